"""Every way that weights lie around: files, shards, pickles, GGUF, a hub, live modules; and broken ones."""

import argparse
import json
import math
import os
import pickle
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq
from keyquery.checkpoints.sources import Safetensors
from keyquery.checkpoints.vocabulary import vocabulary

LAYERS, HEADS, KEYS, WIDTH, RANK = 3, 4, 2, 16, 4
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "hidden_size": WIDTH}


def weights(dtype=torch.float32):
    torch.manual_seed(7)
    tensors = {"model.embed_tokens.weight": torch.randn(50, WIDTH)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for role, rows in (("q", HEADS * RANK), ("k", KEYS * RANK), ("v", KEYS * RANK)):
            tensors[f"{name}.self_attn.{role}_proj.weight"] = torch.randn(rows, WIDTH)
        tensors[f"{name}.self_attn.o_proj.weight"] = torch.randn(WIDTH, HEADS * RANK)
        tensors[f"{name}.input_layernorm.weight"] = torch.rand(WIDTH)
        tensors[f"{name}.mlp.up_proj.weight"] = torch.randn(64, WIDTH)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@pytest.fixture
def folder(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def assert_same_heads(one, other):
    assert len(one) == len(other) == LAYERS
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.form.query.float(), b.form.query.float())
        torch.testing.assert_close(a.form.key.float(), b.form.key.float())


def test_grouped_heads_have_their_own_key(folder):
    layer = kq.read(folder)[1]
    tensors = weights()
    assert layer.form.batch == (KEYS, HEADS // KEYS)
    for head in range(HEADS):
        query = tensors["model.layers.1.self_attn.q_proj.weight"][head * RANK : (head + 1) * RANK]
        group = head // (HEADS // KEYS)
        key = tensors["model.layers.1.self_attn.k_proj.weight"][group * RANK : (group + 1) * RANK]
        torch.testing.assert_close(layer.form[group, head % 2].dense(), query.mT @ key)


def test_shards_are_read_as_one_file(folder, tmp_path):
    shards = tmp_path / "sharded"
    shards.mkdir()
    tensors = weights()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, shards / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (shards / "config.json").write_text(json.dumps(CONFIG))
    assert_same_heads(kq.read(shards), kq.read(folder))


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"state_dict": t, "epoch": 3}])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(folder, tmp_path, wrap, zipped):
    path = tmp_path / "weights.pt"
    torch.save(wrap(weights()), path, _use_new_zipfile_serialization=zipped)
    assert_same_heads(kq.read(path), kq.read(folder))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_that_share_a_storage_are_counted_once(folder, tmp_path, zipped):
    """As of a model whose output is tied to its embedding, which every state dict holds as two tensors."""
    path, large = tmp_path / "weights.pt", torch.ones(64, 1024)
    torch.save({**weights(), "embedding": large, "output": large.detach()}, path, _use_new_zipfile_serialization=zipped)
    assert path.stat().st_size < 2 * large.nbytes
    assert_same_heads(kq.read(path), kq.read(folder))


def test_a_torch_file_with_more_than_weights_is_refused_by_name(tmp_path):
    """As files of fairseq are, which hold their command line."""
    path = tmp_path / "weights.pt"
    torch.save({"model": weights(), "args": argparse.Namespace(heads=4)}, path)
    with pytest.raises(ValueError, match=r"refused: it holds more than weights \(argparse\.Namespace\)"):
        kq.read(path)


def test_the_sizes_that_a_torch_file_states_stand_in_for_a_config(tmp_path):
    """As OpenAI's Whisper files state their heads, those of sound and of text apart."""
    names = {"encoder.blocks.0.attn": 2, "decoder.blocks.0.attn": 4, "decoder.blocks.0.cross_attn": 4}
    tensors = {f"{name}.{part}.weight": torch.randn(8, 8) for name in names for part in ("query", "key")}
    path = tmp_path / "tiny.pt"
    torch.save({"dims": {"n_audio_head": 2, "n_text_head": 4, "odd": "no"}, "model_state_dict": tensors}, path)
    assert {layer.name: math.prod(layer.form.batch) for layer in kq.read(path)} == names
    (tmp_path / "config.json").write_text(json.dumps({"n_audio_head": 1, "n_text_head": 1}))
    assert math.prod(kq.read(path)[0].form.batch) == 1  # a config is believed first


def test_a_bare_file_needs_heads(tmp_path):
    path = tmp_path / "bare.safetensors"
    save_file(weights(), path)
    with pytest.raises(ValueError, match=r"does not say how many heads it has: give heads"):
        kq.read(path)[0]
    heads = kq.read(path, heads=HEADS)
    assert heads.family.name == "llama"
    assert heads[0].form.batch == (KEYS, HEADS // KEYS)
    assert heads[0].notes == ("rotary positions unknown: there is no config",)


def test_a_config_can_be_given(tmp_path):
    path, config = tmp_path / "bare.safetensors", tmp_path / "elsewhere.json"
    save_file(weights(), path)
    config.write_text(json.dumps(CONFIG))
    assert kq.read(path, config=config)[0].rope.dims == RANK
    assert kq.read(path, config=CONFIG)[0].rope.dims == RANK


def test_only_queries_keys_and_their_norm_are_read(folder, monkeypatch):
    reads = []
    rows = Safetensors.rows
    monkeypatch.setattr(Safetensors, "rows", lambda self, *args: (reads.append(args), rows(self, *args))[1])
    heads = kq.read(folder)
    assert reads == []
    heads[1]
    assert {name for name, *_ in reads} == {
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.input_layernorm.weight",
    }


def test_values_that_are_fused_behind_the_keys_are_not_read(tmp_path, monkeypatch):
    save_file(
        {f"layers.{i}.self_attn.qkv_proj.weight": torch.randn(32, 16) for i in range(2)}, tmp_path / "m.safetensors"
    )
    config = {"model_type": "phi3", "num_attention_heads": 4, "hidden_size": 16}
    reads = []
    rows = Safetensors.rows
    monkeypatch.setattr(Safetensors, "rows", lambda self, *args: (reads.append(args), rows(self, *args))[1])
    assert kq.read(tmp_path / "m.safetensors", config=config)[0].form.batch == (2, 2)
    assert reads == [("layers.0.self_attn.qkv_proj.weight", 0, 24)]  # 4 queries and 2 keys of width 4; 2 values left


def test_a_live_model_is_read_without_copies():
    model = torch.nn.TransformerEncoderLayer(16, 4)
    (layer,) = kq.read(model)
    assert layer.form.query.data_ptr() == model.self_attn.in_proj_weight.data_ptr()


def test_unknown_layouts_say_what_they_hold_and_can_be_pointed_at(tmp_path):
    path = tmp_path / "odd.safetensors"
    tensors = {f"trunk.{i}.{name}.weight": torch.randn(8, 8) for i in range(2) for name in ("ask", "tell", "say")}
    save_file(tensors, path)
    with pytest.raises(
        ValueError, match=r"this layout is not known. It holds trunk\.\{layer\}\.ask\.weight, .*--query PATTERN"
    ):
        kq.read(path)
    with pytest.raises(
        ValueError, match=r"no tensor 'trunk\.\{layer\}\.ask'; .*; did you mean 'trunk\.\{layer\}\.ask\.weight'\?"
    ):
        kq.read(path, heads=2, query="trunk.{layer}.ask", key="trunk.{layer}.tell")
    heads = kq.read(path, heads=2, query="trunk.{layer}.ask.weight", key="trunk.{layer}.tell.weight")
    assert (len(heads), heads[1].name) == (2, "trunk.1")
    torch.testing.assert_close(
        heads[1].form.sum().dense(), tensors["trunk.1.ask.weight"].mT @ tensors["trunk.1.tell.weight"]
    )
    with pytest.raises(ValueError, match="query and key patterns go together"):
        kq.read(path, heads=2, query="trunk.{layer}.ask.weight")


def test_output_maps_are_forms(folder):
    tensors = weights()
    out = list(kq.read(folder).output)[2]
    value = tensors["model.layers.2.self_attn.v_proj.weight"]
    output = tensors["model.layers.2.self_attn.o_proj.weight"]
    for head in range(HEADS):
        group = head // 2
        expected = output[:, head * RANK : (head + 1) * RANK] @ value[group * RANK : (group + 1) * RANK]
        torch.testing.assert_close(out[group, head % 2].dense(), expected)


def test_embedding(folder):
    torch.testing.assert_close(kq.read(folder).embedding(), weights()["model.embed_tokens.weight"])


# GGUF


def permuted(weight, heads):
    """How a converter stores q and k: pairs (i, i + r/2) become neighbours."""
    rank = len(weight) // heads
    return weight.reshape(heads, 2, rank // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def test_gguf_reads_the_same_scores_at_every_offset(folder, tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_rope_dimension_count(RANK)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["one", "Ġtwo"])
    tensors = weights()
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        query, key = (tensors[f"{name}.self_attn.{role}_proj.weight"] for role in ("q", "k"))
        writer.add_tensor(f"blk.{layer}.attn_q.weight", permuted(query, HEADS).numpy())
        writer.add_tensor(f"blk.{layer}.attn_k.weight", permuted(key, KEYS).numpy())
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", tensors[f"{name}.input_layernorm.weight"].numpy())
    writer.add_tensor(
        "token_embd.weight",
        gguf.quants.quantize(torch.randn(50, 32).numpy(), gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    heads, original = kq.read(path), kq.read(folder)
    assert (heads.family.name, len(heads)) == ("gguf", LAYERS)
    assert vocabulary(path) == ["one", "▁two"]
    assert heads[0].rope.interleaved
    for offset in (0, -1, -7):
        for one, other in zip(heads, original, strict=True):
            given, expected = (layer.form.at(offset, layer.rope).dense() for layer in (one, other))
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(heads[0].folded.norm2, original[0].folded.norm2)
    assert heads.embedding().shape == (50, 32)


def test_a_broken_gguf_is_named(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 40)
    with pytest.raises(ValueError, match="is not a readable GGUF file"):
        kq.read(path)


# The hub


class RangeServer(BaseHTTPRequestHandler):
    """A hub that serves a folder, by ranges; anything else is refused."""

    folder, asked, ranges = None, [], True

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.folder / self.path.rsplit("/", 1)[-1]
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            return
        data, status = path.read_bytes(), 200
        if body and "Range" in self.headers and self.ranges:
            first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
            data, status = data[first : last + 1], 206
            type(self).asked.append((path.name, first, last))
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"e"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(folder, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")
    server = ThreadingHTTPServer(("127.0.0.1", 0), RangeServer)
    RangeServer.folder, RangeServer.asked, RangeServer.ranges = folder, [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_model_is_read_by_byte_ranges(hub, folder):
    heads = kq.read("org/name")
    assert_same_heads(heads, kq.read(folder))
    file = folder / "model.safetensors"
    header = struct.unpack("<Q", file.read_bytes()[:8])[0]
    data = [last - first + 1 for _, first, last in RangeServer.asked if first >= 8 + header]
    wanted = LAYERS * (HEADS * RANK + KEYS * RANK + 1) * WIDTH * 4
    assert sum(data) == wanted
    assert heads.source.fetched < os.path.getsize(file)


def test_a_hub_that_serves_no_ranges_is_refused(hub):
    RangeServer.ranges = False
    with pytest.raises(ValueError, match=r"does not serve parts of model\.safetensors"):
        kq.read("org/name")


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")
    address = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    with pytest.raises(ConnectionError, match="org/name could not be had from the hub"):
        kq.read("org/name")


# Broken and hostile files


class Code:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def overclaiming(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**15) + b"{}")


def not_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"hello, world, this is no header at all")


def with_index(**shards):
    def write(folder):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    return write


def poisoned(folder):
    tensors = weights()
    tensors["model.layers.1.self_attn.k_proj.weight"][0, :3] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def config(**changes):
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


BROKEN = {
    "truncated": (truncated, "not a readable safetensors file"),
    "a header that claims too much": (overclaiming, "not a readable safetensors file"),
    "no safetensors": (not_safetensors, "not a readable safetensors file"),
    "a missing shard": (with_index(a="gone.safetensors"), r"lacks the shard gone\.safetensors"),
    "a shard elsewhere": (with_index(a="../../etc/passwd"), "which is not a file in it: refused"),
    "a shard at an absolute path": (with_index(a="/etc/passwd"), "which is not a file in it: refused"),
    "an index of numbers": (with_index(a=3), "no weight_map of file names"),
    "NaN weights": (poisoned, r"layers\.1\.self_attn: 3 of 128 key weights are NaN or infinite"),
    "zero heads": (config(num_attention_heads=0, n_head=0), "heads must be at least 1, got 0"),
    "negative heads": (config(num_attention_heads=-3), "heads must be at least 1, got -3"),
    "heads that do not divide": (config(num_attention_heads=5), "16 rows are not 5 heads of equal width"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(case, folder):
    break_it, words = BROKEN[case]
    break_it(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        list(kq.read(folder))


def test_a_pickle_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, write in (
        ("a.bin", lambda path: torch.save({"w": Code()}, path)),
        ("b.pt", lambda path: path.write_bytes(pickle.dumps({"w": Code()}))),
    ):
        write(tmp_path / name)
        with pytest.raises(ValueError, match=r"is refused|is not a readable torch file"):
            kq.read(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pt", b"", "is not a readable torch file"),
        ("a.pt", b"PK\x03\x04garbage", "is not a readable torch file"),
        ("a.txt", b"hello", "has an unknown file type"),
    ],
)
def test_files_of_no_use_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        kq.read(tmp_path / name)


def test_a_tensor_alone_is_no_checkpoint(tmp_path):
    torch.save(torch.ones(3), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds no named tensors"):
        kq.read(tmp_path / "a.pt")


def test_what_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere is neither a file, nor a folder, nor a hub"):
        kq.read("nowhere")


def test_a_model_on_meta_has_no_weights():
    with torch.device("meta"):
        model = torch.nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="is on the meta device"):
        kq.read(model)


@pytest.mark.unchecked
def test_a_number_is_no_source():
    with pytest.raises(TypeError, match=r"source must be a path, a hub name or an nn\.Module, got int"):
        kq.read(3)
