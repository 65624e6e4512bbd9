"""Proofs: the scores of tiny models against what their checkpoints are read to have."""

import dataclasses
import json

import pytest
import torch

pytest.importorskip("transformers", reason="proofs need the extra hf")

from typer.testing import CliRunner

import keyquery as kq
from keyquery.checkpoints import reader
from keyquery.checkpoints.family import families, parse
from keyquery.cli import app
from keyquery.testing.proof import search, written
from keyquery.testing.proof.capture import captured
from keyquery.testing.proof.proof import Proof, prove
from keyquery.testing.proof.sizes import shrink
from keyquery.testing.proof.sweep import cached, counts, sweep


@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2", "t5", "cohere2", "qwen3_next", "marian"])
def test_a_sample_is_exact(name):
    proof = prove(name)
    assert proof.status == "exact", str(proof)
    assert proof.error < 1e-5
    assert not proof.missing
    assert not proof.untested


@pytest.mark.parametrize(
    ("fact", "wrong", "word"),
    [("rope", "interleaved", "wrong"), ("rope", None, "wrong"), ("scale", "one", "wrong"), ("causal", False, "wrong")],
)
def test_a_wrong_fact_is_found(fact, wrong, word, monkeypatch):
    family = families()["qwen3"]
    entry = dataclasses.replace(family.attention[0], **{fact: wrong})
    monkeypatch.setitem(families(), "qwen3", dataclasses.replace(family, attention=[entry]))
    assert prove("qwen3").status == word


def test_attention_that_is_not_read_is_found(monkeypatch):
    family = families()["t5"]
    monkeypatch.setitem(families(), "t5", dataclasses.replace(family, attention=family.attention[:2]))
    monkeypatch.setattr(reader, "uncovered", lambda *_: [])
    proof = prove("t5")
    assert proof.status == "missing layers"
    assert proof.missing == [f"decoder.block.{n}.layer.1.EncDecAttention" for n in (0, 1)]


def test_models_without_attention_and_unknown_types():
    assert prove("mamba").status == "no softmax attention"
    assert prove("frobnicate").status == "cannot be built"


def test_a_folder_is_proven_with_its_own_config(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=64).save_pretrained(tmp_path)
    assert prove(tmp_path).status == "exact"


def test_the_search_writes_a_reading_that_is_exact(monkeypatch):
    """Cohere 2: interleaved pairs, and full-attention layers without RoPE."""
    found, lost = search.sought("cohere2")
    assert lost == []
    tables = written.family_tables("cohere2", found)
    (entry,) = tables["attention"]
    assert (entry["rope"], entry["rope_kinds"], entry["causal"]) == ("interleaved", ["sliding_attention"], True)
    text = written.as_toml(tables, "found")
    assert 'query = "layers.{layer}.self_attn.q_proj"' in text
    import tomllib

    assert parse("cohere2", tomllib.loads(text)).attention == parse("cohere2", tables).attention


def test_every_softmax_of_products_is_captured_and_no_other():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.router = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            scores = torch.einsum("nd,md->nm", self.q(x), self.k(x)) / 2
            return (scores + 1).softmax(-1) @ x, self.router(x).softmax(-1)

    model = Odd()
    with captured(model) as capture:
        model(torch.randn(5, 4))
    (event,) = capture.events
    assert event.scores.shape == (5, 5)


def test_sizes_keep_their_relations():
    facts = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    facts |= {"num_hidden_layers": 40, "layer_types": ["a", "a", "a", "b"] * 10, "vocab_size": 50000}
    facts |= {"image_token_id": 49999, "rope_parameters": {"mrope_section": [16, 24, 24]}}
    small = shrink(facts, 16)
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"]
    assert small["num_key_value_heads"] < small["num_attention_heads"]
    assert set(small["layer_types"]) == {"a", "b"}
    assert len(small["layer_types"]) == small["num_hidden_layers"]
    assert small["image_token_id"] < small["vocab_size"] < 100
    assert sum(small["rope_parameters"]["mrope_section"]) == small["head_dim"] // 2


def test_a_file_with_attention_that_is_not_read_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    from keyquery.testing.families import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {f"extra.{n}.attn.{role}.weight": torch.randn(32, 32) for n in (0, 1) for role in ("query", "key")}
    save_file({**load_file(file), **more}, file)
    with pytest.raises(ValueError, match=r"2 attention modules are not read as llama: extra\.0\.attn and 1 more"):
        kq.read(tmp_path)
    heads = kq.read(tmp_path, partial=True)
    assert heads[0].notes == ("partial: 2 attention modules are not read: extra.0.attn and 1 more of its kind",)
    assert kq.look(tmp_path, partial=True).layers[0]["notes"] == list(heads[0].notes)


def test_a_type_that_is_proven_to_be_wrong_is_refused(tmp_path, monkeypatch):
    from keyquery.testing.families import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), "model_type": "frobnicate"}
    for status, words in (("exact", None), ("wrong", "is not supported"), ("cannot be built", "unproven: ")):
        monkeypatch.setattr(reader, "proof_of", lambda _, status=status: Proof("frobnicate", status, family="llama"))
        if status == "wrong":
            with pytest.raises(ValueError, match=words):
                kq.read(tmp_path, config=config)
            continue
        layer = kq.read(tmp_path, config=config)[0]
        assert (layer.rope is not None) == (status == "exact")
        assert layer.notes == () if words is None else layer.notes[0].startswith(words)


def test_proofs_are_kept(tmp_path):
    cache = tmp_path / "proofs.jsonl"
    seen = []
    first = sweep(["gpt2", "frobnicate"], cache, seen.append)
    assert [proof.status for proof in first] == ["exact", "cannot be built"]
    assert sweep(["gpt2", "frobnicate"], cache, seen.append) == first
    assert len(seen) == 2
    assert set(cached(cache)) == {"gpt2", "frobnicate"}


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, ["prove", "gpt2", "--json", str(tmp_path / "proof.json")])
    assert done.exit_code == 0
    assert done.stdout.startswith("gpt2: exact, 2 attention modules, largest relative error")
    assert json.loads((tmp_path / "proof.json").read_text())[0]["status"] == "exact"


@pytest.mark.slow
def test_nothing_is_read_wrongly():
    """All config types, 20 minutes: none is wrong, none loses layers, and as many are exact as the docs say."""
    found = counts(sweep())
    assert found["wrong"] == found["missing layers"] == 0
    assert found["exact"] >= 515
