"""Torch files by our own reader: the same as torch reads, and nothing that a hostile pickle asks for."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch

import keyquery as kq
from keyquery.checkpoints.formats.torch_files import MAGIC, load_pickled
from keyquery.support import bounded_pickle
from tests.hostile import assert_refused


def saved(folder, data, zipped=True):
    torch.save(data, folder / "a.pt", _use_new_zipfile_serialization=zipped)
    return folder / "a.pt"


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_it_reads_what_torch_reads(tmp_path, zipped, mapped):
    model = torch.nn.TransformerEncoderLayer(8, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8)).sum().backward()
    optimiser.step()
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
    whole = torch.arange(24.0)
    data = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "kinds": [torch.ones(3, dtype=kind) for kind in kinds],
        "views": [whole.view(4, 6), whole.view(4, 6).mT, whole[5:], whole[::2], torch.tensor(3.0), torch.zeros(0, 4)],
        "new": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "plain": {"a": (1, 2.5, None, True, "é", b"\x00\xff", {3, 4}, 1j, torch.Size([2, 3]), torch.float16)},
        "ordered": OrderedDict(b=1, a=2),
        "rng": torch.get_rng_state(),
        -3: -(2**70),
    }
    if not zipped:
        del data["new"]  # which the older format cannot hold
    path = saved(tmp_path, data, zipped)
    expected, found = torch.load(path, weights_only=True), load_pickled(path, mapped=mapped)
    assert same(found, expected)
    assert len({one.untyped_storage().data_ptr() for one in found["views"][:4]}) == 1  # shared, as they were
    found["views"][0].zero_()  # and the file is not written to
    assert same(load_pickled(path), expected)


# Pickles by hand


def zipped(folder, content, storages=None, name="a.pt"):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return folder / name


def older(folder, content):
    head = pickle.dumps(MAGIC, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    (folder / "a.pt").write_bytes(head + content + pickle.dumps([], 2))
    return folder / "a.pt"


def shared_lists():
    """A list of two times the same list, sixty levels deep: 2⁶⁰ items in 500 bytes."""
    value = []
    for _ in range(60):
        value = [value, value]
    return pickle.dumps({"w": value}, 2)


def shared_id():
    """The same where a persistent id is expected: to print it would take for ever."""
    return shared_lists()[:-1] + b"Q."


def shared_dicts():
    value = {}
    for _ in range(90):
        value = {"a": value, "b": value}
    return pickle.dumps({"dims": value, "state_dict": value}, 2)


def itself():
    value = []
    value.append(value)
    return pickle.dumps({"w": value}, 2)


def deep():
    return b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."


def called(name, argument):
    return b"\x80\x02c" + name.encode().replace(b" ", b"\n") + b"\n" + pickle.dumps((argument,), 2)[2:-1] + b"R."


def copies():
    """The same text, encoded ten thousand times."""
    text = b"X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + b"q\x01"
    return b"\x80\x02(" + text + (b"c_codecs\nencode\nh\x01\x85R") * 10_000 + b"t."


def collisions():
    """Integers of one hash, as keys: a dict of them takes the square of their number."""
    keys = b"".join(pickle.dumps((i + 1) * (2**61 - 1), 2)[2:-1] + b"N" for i in range(50_000))
    return b"\x80\x02}(" + keys + b"u."


HOSTILE = {
    "shared lists": (shared_lists, "shared containers expand to more than"),
    "shared dicts": (shared_dicts, "shared containers expand to more than"),
    "shared lists as an id": (shared_id, "persistent id that is no storage"),
    "itself": (itself, "contains itself"),
    "deep": (deep, "nested more than 100 deep"),
    "bytearray": (lambda: called("builtins bytearray", 5 * 10**9), "more than weights (builtins.bytearray)"),
    "storage": (lambda: called("torch FloatStorage", 10**10), "calls something that is not a function"),
    "tensor": (lambda: called("torch Tensor", 10**10), "more than weights (torch.Tensor)"),
    "a long integer": (lambda: b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".", "more than 128 bits"),
    "many copies": (copies, "copies more bytes than it holds"),
    "keys of one hash": (collisions, "is not supported as a key"),
    "a name with escape codes": (lambda: b"\x80\x02c\x1b[2Jos\nsystem\n.", "more than weights"),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("write", [zipped, older])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_at_once(case, write, tmp_path):
    make, words = HOSTILE[case]
    path = write(tmp_path, make())
    assert_refused(lambda: kq.read(path), words, growth=64 + 64 * path.stat().st_size / 2**20)


def test_a_pickle_takes_no_more_steps_than_are_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_pickle, "STEPS", 10_000)  # three million take seconds
    for content in (b"]" * 10_000, b"]q\x01" + b"(" + b"K\x01" * 100 + b"e" + b"ctorch\nSize\nh\x01\x85R0" * 2000):
        with pytest.raises(ValueError, match="more than 10000 steps"):
            load_pickled(zipped(tmp_path, b"\x80\x02(" + content + b"t."))


def tensor(size, stride, count=2, offset=0):
    """A tensor of a storage of `count` floats."""
    inner = pickle.dumps(("storage", "T", "0", "cpu", count), 2)[2:-1]
    kind = b"X\x01\x00\x00\x00T"
    assert kind in inner
    head = b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
    body = inner.replace(kind, b"ctorch\nFloatStorage\n") + b"Q" + pickle.dumps(offset, 2)[2:-1]
    return head + body + pickle.dumps(size, 2)[2:-1] + pickle.dumps(stride, 2)[2:-1] + b"\x89}tRs."


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (((10**6, 10**6), (0, 0)), "more than its storage holds"),
        (((3,), (1,)), "more than its storage holds"),
        (((2,), (5,)), "more than its storage holds"),
        (((1,), (1,), 2, 7), "more than its storage holds"),
        (((-1,), (1,)), "must be integers from 0"),
        (((2, 1), (1,)), "has 1 strides"),
        (((1,) * 65, (1,) * 65), "at most 64 are read"),
        (((1,), (1,), 10**12), "says that it has 4000000000000 bytes, and has 8"),
    ],
)
def test_tensors_lie_within_their_storages(claim, words, tmp_path):
    fine = zipped(tmp_path, tensor((2,), (1,)), {"0": struct.pack("<2f", 1, 2)})
    assert load_pickled(fine)["w"].tolist() == [1, 2]
    path = zipped(tmp_path, tensor(*claim), {"0": struct.pack("<2f", 1, 2)}, "b.pt")
    with pytest.raises(ValueError, match=words):
        load_pickled(path)


def test_another_byte_order_is_refused(tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.writestr("a/byteorder", b"big")
    (tmp_path / "a.pt").write_bytes(data.getvalue())
    with pytest.raises(ValueError, match="another byte order"):
        load_pickled(tmp_path / "a.pt")
