"""Every way that weights lie around: files, shards, pickles, GGUF, a hub, live modules; and broken ones."""

import argparse
import json
import math
import os
import pickle
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import keyquery as kq
from keyquery.checkpoints.sources import Safetensors

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


def test_output_maps_are_forms(folder):
    tensors = weights()
    out = list(kq.read(folder).output)[2]
    value = tensors["model.layers.2.self_attn.v_proj.weight"]
    output = tensors["model.layers.2.self_attn.o_proj.weight"]
    for head in range(HEADS):
        group = head // 2
        expected = output[:, head * RANK : (head + 1) * RANK] @ value[group * RANK : (group + 1) * RANK]
        torch.testing.assert_close(out[group, head % 2].dense(), expected)


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
    "an empty config": (lambda f: (f / "config.json").write_text(" "), "config.json is empty; expected a JSON object"),
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


def test_a_model_on_meta_has_no_weights():
    with torch.device("meta"):
        model = torch.nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="is on the meta device"):
        kq.read(model)


@pytest.mark.unchecked
def test_a_number_is_no_source():
    with pytest.raises(TypeError, match=r"source must be a path, a hub name or an nn\.Module, got int"):
        kq.read(3)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pt", b"", "is not a readable torch file"),
        ("a.pt", b"PK\x03\x04garbage", "is not a readable torch file"),
        ("a.pt", pickle.dumps(3), "is not a readable torch file"),
        ("a.txt", b"hello", "has an unknown file type"),
        ("a.gguf", b"GGUF" + b"\xff" * 40, "is not a readable GGUF file"),
    ],
)
def test_files_of_no_use_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        kq.read(tmp_path / name)


@pytest.mark.parametrize("name", ["nowhere", "gone/model.safetensors", "here/model"])
def test_what_is_not_there_is_named_and_is_no_hub_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match=f"{name} is neither a file, nor a folder, nor a hub model"):
        kq.read(name)


def test_unknown_layouts_say_what_they_hold_and_what_a_pattern_may_mean(tmp_path):
    path = tmp_path / "odd.safetensors"
    save_file({f"trunk.{i}.{name}.weight": torch.randn(8, 8) for i in range(2) for name in ("ask", "tell")}, path)
    words = r"this layout is not known. It holds trunk\.\{layer\}\.ask\.weight, .*--query PATTERN"
    with pytest.raises(ValueError, match=words):
        kq.read(path)
    words = r"no tensor 'trunk\.\{layer\}\.ask'; .*; did you mean 'trunk\.\{layer\}\.ask\.weight'\?"
    with pytest.raises(ValueError, match=words):
        kq.read(path, heads=2, query="trunk.{layer}.ask", key="trunk.{layer}.tell")


def test_norms_of_files_from_tensorflow_are_read_by_their_old_names(tmp_path):
    pytest.importorskip("transformers", reason="the model needs the extra hf")
    from keyquery.proof.families import tiny_model

    model = tiny_model("bert")
    model.save_pretrained(tmp_path)
    expected = kq.read(tmp_path)[1].norm
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file).items()
    save_file({re.sub("|".join(old), lambda match: old[match[0]], name): value for name, value in tensors}, file)
    norm = kq.read(tmp_path)[1].norm
    assert torch.equal(norm.gain, expected.gain)
    assert torch.equal(norm.shift, expected.shift)
