"""A short part of `make fuzz`, under hypothesis, which shrinks what it finds; and single files of the worst kind."""

import ctypes
import gc
import gzip
import json
import lzma
import mmap
import os
import struct
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.layers import LanguageModel
from keyquery.learn.data import load_ts
from keyquery.support import files
from tests.fuzz import readers
from tests.fuzz.guard import BOUND, Broken, watched
from tests.fuzz.readers import READERS
from tests.fuzz.run import Bench

pytest.importorskip("gguf", reason="needs the extra gguf")


@pytest.fixture(autouse=True)
def no_garbage():
    """Memory of other tests that is freed while a reader runs, or that it gets again, would hide what it takes."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
few = settings(max_examples=8, suppress_health_check=list(HealthCheck))


@pytest.mark.unchecked
@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_refused(name, tmp_path):
    bench = Bench(tmp_path, [name])

    @few
    @given(st.randoms(use_true_random=False))
    def read(chance):
        bench.one(name, chance)

    read()


@pytest.mark.unchecked
@pytest.mark.parametrize("family", [readers.llama, readers.latent, readers.fused])
def test_a_config_may_say_anything(family, tmp_path):
    family(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())

    @settings(few, max_examples=20)
    @given(st.dictionaries(st.sampled_from([*known, "attention_multiplier", "rotary_dim", "rope_parameters"]), JSON))
    def read(said):
        (tmp_path / "config.json").write_text(json.dumps({**known, **said}))
        with watched(tmp_path, 10_000):
            readers.look(tmp_path)

    read()


# The guard itself: what it must not let pass


def test_the_guard_sees_what_it_is_for(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_text("secret")

    def hold():
        """Take pages of the system's: an allocator may have that much at hand, in memory that is counted already."""
        size = BOUND + 2**24
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)

    def crash():
        raise KeyError("x")

    deeds = {
        "opened": lambda: (tmp_path / "secret").read_text(),
        "memory": hold,
        "crash": crash,
        "os.system": lambda: os.system("true"),
    }
    for said, deed in deeds.items():
        with pytest.raises(Broken, match=said), watched(tmp_path / "folder", 0):
            deed()
    with watched(tmp_path / "folder", 0):
        raise ValueError("in one sentence")


# Small files that ask for much


def packed_pickle(folder):
    readers.pickled(True)(folder)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 20_000_000)
        archive.writestr("archive/version", b"3\n")


def many_layers(folder):
    """Gemma's layers are listed one by one, and the file says that there are 2³² − 1."""
    readers.gguf_file(folder)
    file = folder / "model.gguf"
    data, name = file.read_bytes(), b"gemma2.block_count"
    at = data.index(name) + len(name) + 4
    file.write_bytes(data[:at] + struct.pack("<I", 2**32 - 1) + data[at + 4 :])


def long_array(folder):
    """An array of 2⁴⁰ numbers, of which the file has none."""
    name = b"a"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name
    (folder / "model.gguf").write_bytes(head + struct.pack("<IIQ", 9, 4, 2**40))


def wide_rope(folder):
    readers.llama(folder)
    facts = {name: value for name, value in readers.CONFIG.items() if name not in ("layer_types", "sliding_window")}
    (folder / "config.json").write_text(
        json.dumps({**facts, "model_type": "glm4", "partial_rotary_factor": 10**11 / 4})
    )


def linked_shard(folder):
    readers.sharded(folder)
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to("/dev/zero")


def one_long_dimension(folder):
    (folder / "a.ts").write_text("@data\n" + ",".join(["1"] * 40_000) + ":1" * 40_000 + "\n")


def id_far_above_the_others(folder):
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 10**12}))


def strangers_pattern(folder):
    facts = json.loads((kq.models.ENCODER / "tokenizer.json").read_text())
    facts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"
    (folder / "tokenizer.json").write_text(json.dumps(facts))


def huge(**sizes):
    def make(folder):
        readers.own_model(folder)
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**facts, **sizes}))

    return make


def read_all(folder):
    return list(kq.read(folder))


def read_series(folder):
    return load_ts(folder / "a.ts")


HUGE = r"does not match the model in config|has more than"
HOSTILE = {
    "a packed pickle": (packed_pickle, read_all, "larger than the file"),
    "a GGUF file of many layers": (many_layers, read_all, "4294967295 layers, and it holds"),
    "a GGUF array without end": (long_array, read_all, "holds 1099511627776 values"),
    "rotary positions without end": (wide_rope, read_all, "turn 100000000000 dimensions, and a head has 4"),
    "a shard that links to a device": (linked_shard, read_all, r"b\.safetensors is a device or a pipe"),
    "a long series among many": (one_long_dimension, read_series, "40001 dimensions, of which one has 40000 values"),
    "an id far above the others": (id_far_above_the_others, vocabulary, "2 tokens cannot have the id 1000000000000"),
    "a stranger's pattern": (strangers_pattern, Tokenizer.load, "not byte-level BPE with keyquery's pattern"),
    "a huge vocabulary": (huge(vocab_size=10**11), LanguageModel.load, HUGE),
    "a huge depth": (huge(depth=10**9), LanguageModel.load, HUGE),
    "a huge width": (huge(width=2**20, num_attention_heads=2), LanguageModel.load, HUGE),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence(case, tmp_path):
    make, read, said = HOSTILE[case]
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    with watched(folder, 100_000), pytest.raises(ValueError, match=said):
        read(folder)


def test_links_to_regular_files_are_followed(tmp_path):
    """Shared storage, and the hub's own library, keep models as links."""
    store, one, sharded = (tmp_path / name for name in ("store", "one", "sharded"))
    for folder in (store, one, sharded):
        folder.mkdir()
    readers.llama(store)
    for name in ("config.json", "model.safetensors"):
        (one / name).symlink_to(store / name)
    assert len(kq.read(one)) == len(kq.read(one / "model.safetensors")) == 2
    whole = store / "sharded"
    whole.mkdir()
    readers.sharded(whole)
    for file in whole.iterdir():
        (sharded / file.name).symlink_to(file)
    assert len(kq.read(sharded)) == len(kq.read(whole))
    (one / "model.safetensors").unlink()
    (one / "model.safetensors").symlink_to(store / "gone")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is a link to a file that does not exist"):
        kq.read(one)


@pytest.mark.parametrize("ending", [".gz", pytest.param(".xz", marks=pytest.mark.slow)])
def test_a_packed_text_comes_to_no_more_than_is_said(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "UNPACKED", 2**20)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}[ending]
    (tmp_path / f"a{ending}").write_bytes(pack(b"a" * 2**22))
    with pytest.raises(ValueError, match="decompresses to more than the limit of 1048576 bytes"):
        files.read_text(tmp_path / f"a{ending}")
    for whole in (b"", b"a" * 2**19, os.urandom(2**21).hex().encode()):  # one stream, or several after each other
        (tmp_path / f"a{ending}").write_bytes(pack(whole) + pack(b"end"))
        assert files.read_text(tmp_path / f"a{ending}") == whole.decode() + "end"
    (tmp_path / f"a{ending}").write_bytes(pack(b"a" * 999)[:-9])
    with pytest.raises(ValueError, match=f"is not a valid {ending} file"):
        files.read_text(tmp_path / f"a{ending}")
