"""Proofs: the scores of tiny models against what their checkpoints are read to have."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="proofs need the extra hf")

from typer.testing import CliRunner

import keyquery as kq
from keyquery.checkpoints import reader
from keyquery.checkpoints.family import families
from keyquery.cli import app
from keyquery.listening.softmaxes import Capture
from keyquery.proof.compare import Comparison, Match, informative
from keyquery.proof.proof import _verdict, prove
from keyquery.proof.sizes import shrink


@pytest.mark.parametrize(
    "name", ["bert", "qwen3", "gpt2", "t5", "cohere2", "qwen3_next", "marian", "llava", "qwen2_vl"]
)
def test_a_sample_is_exact(name):
    proof = prove(name)
    assert proof.status == "exact", str(proof)
    assert proof.error < 1e-5
    assert not proof.missing
    assert not proof.untested


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gemma3", 7),  # towers of text and of images
        pytest.param("mistral3", 4, marks=pytest.mark.slow),
        ("qwen2_5_vl_vision", 2),  # rows and columns, in windows
        pytest.param("pixtral", 2, marks=pytest.mark.slow),
        pytest.param("dinov3_vit", 2, marks=pytest.mark.slow),  # tokens without a place
        ("mpnet", 2),  # a table of biases
        pytest.param("beit", 2, marks=pytest.mark.slow),
        ("deberta-v2", 2),  # vectors of distances
        pytest.param("parakeet_encoder", 2, marks=pytest.mark.slow),
        pytest.param("hunyuan_v1_dense", 2, marks=pytest.mark.slow),  # norms after the rotation
        pytest.param("gemma3n_text", 4, marks=pytest.mark.slow),  # keys of earlier layers
        pytest.param("segformer", 8, marks=pytest.mark.slow),  # keys of merged tokens
        ("blip_2_qformer", 6),  # keys of another width
        pytest.param("zamba2", 2, marks=pytest.mark.slow),  # tied blocks
        pytest.param("deepseek_v32", 4, marks=pytest.mark.slow),  # indexers
        pytest.param("deepseek_v4", 3, marks=pytest.mark.slow),
        pytest.param("swin", 8, marks=pytest.mark.slow),
        pytest.param("sam_vision_model", 2, marks=pytest.mark.slow),
        pytest.param("xlnet", 2, marks=pytest.mark.slow),
        ("convbert", 2),  # a number of heads that two values of the config give
        pytest.param("longformer", 2, marks=pytest.mark.slow),  # a band, and queries of global tokens
        pytest.param("longt5", 6, marks=pytest.mark.slow),  # blocks
        pytest.param("squeezebert", 2, marks=pytest.mark.slow),  # convolutions in groups of channels
        pytest.param("hrm_text", 4, marks=pytest.mark.slow),  # gates before the queries
        pytest.param("chameleon", 3, marks=pytest.mark.slow),  # norms of each head, and pixels as tokens
        pytest.param("t5gemma2_decoder", 2, marks=pytest.mark.slow),  # one softmax over two sequences
        pytest.param("glm5_next_text", 1, marks=pytest.mark.slow),  # latent attention without a rotary part
        ("gemma4_vision", 2),  # pairs of each axis
        pytest.param("gemma4", 7, marks=pytest.mark.slow),  # with towers of images and of audio
        pytest.param("kimi_k25_vision", 2, marks=pytest.mark.slow),  # axes that alternate
        pytest.param("muse_glimmer_vision", 2, marks=pytest.mark.slow),  # windows in patches
        pytest.param("video_llama_3_vision", 2, marks=pytest.mark.slow),  # a merge that the inputs state
        pytest.param("wavlm", 2, marks=pytest.mark.slow),  # gates of tokens
        ("layoutlmv3", 2),  # boxes of words and patches
        pytest.param("udop", 6, marks=pytest.mark.slow),
        pytest.param("bros", 2, marks=pytest.mark.slow),
        pytest.param("grounding-dino", 18, marks=pytest.mark.slow),  # one product, two softmaxes
    ],
)
def test_positions_and_keys_of_all_kinds_are_exact(name, modules):
    proof = prove(name)
    assert proof.status == "exact", str(proof)
    assert len(proof.modules) == modules


@pytest.mark.parametrize(
    ("family", "name", "facts", "reason"),
    [
        ("glm4v_vision", "qwen2_5_vl_vision", {"axes": ["column", "row"]}, ""),
        pytest.param(
            "glm4v_vision", "qwen2_5_vl_vision", {"grid": {"merge": "spatial_merge_size"}}, "", marks=pytest.mark.slow
        ),
        pytest.param(
            "dinov3_vit", "dinov3_vit", {"grid": {"centred": True, "before": [1]}}, "", marks=pytest.mark.slow
        ),
        ("deberta_v2", "deberta-v2", {"position": "none"}, ""),
        pytest.param("parakeet", "parakeet_encoder", {"position": "none"}, "", marks=pytest.mark.slow),
        pytest.param("hunyuan_v1_moe", "hunyuan_v1_dense", {"norm_after_rope": False}, "", marks=pytest.mark.slow),
        pytest.param("nanochat", "nanochat", {"rope_back": False}, "", marks=pytest.mark.slow),
        ("convbert", "convbert", {"heads": None}, ""),
        pytest.param("gemma4_vision", "gemma4_vision", {"rope": "half"}, "", marks=pytest.mark.slow),
        ("layoutlmv3", "layoutlmv3", {"position": "none"}, ""),
        pytest.param("wavlm", "wavlm", {"position": "t5"}, "", marks=pytest.mark.slow),
        pytest.param("kimi_k25_vision", "kimi_k25_vision", {"axes_alternate": False}, "", marks=pytest.mark.slow),
        pytest.param("chameleon", "chameleon", {"qk_norm_by_head": False}, "", marks=pytest.mark.slow),
        pytest.param("t5gemma2_decoder", "t5gemma2_decoder", {"rope": None}, "", marks=pytest.mark.slow),
        pytest.param("longt5", "longt5", {"position": "none"}, "", marks=pytest.mark.slow),
        ("mistral", "mistral", {"window": None}, "window of all, but queries see only keys less than 5 tokens away"),
        ("llama", "llama", {"window": "all"}, "window of 3, but queries see keys that are further away"),
    ],
)
def test_wrong_positions_and_windows_are_found(family, name, facts, reason, monkeypatch):
    read = families()[family]
    entries = [dataclasses.replace(entry, **facts) for entry in read.attention]
    monkeypatch.setitem(families(), family, dataclasses.replace(read, attention=entries))
    if name == "llama":  # a window that the model does not have
        monkeypatch.setattr("keyquery.checkpoints.heads.window_of", lambda *_: 3)
    proof = prove(name)
    assert proof.status == "wrong"
    assert reason in proof.reason


@pytest.mark.parametrize("order", [(0.0, float("nan")), (float("nan"), 0.0)])
def test_an_error_that_is_no_number_is_not_exact(order):
    compared = object.__new__(Comparison)
    compared.heads, compared.groups, compared.seen = SimpleNamespace(family=families()["llama"]), {}, set()
    compared.matches = lambda *_: [Match("attention", "attention", error, error) for error in order]
    runs = [(Capture(), None)]
    assert _verdict([compared], nn.Identity(), runs, [], {"model_type": "x"}).status == "wrong"


@pytest.mark.parametrize("query", [{}, {"q_lora_rank": None}])
def test_biases_of_latents_are_read(query):
    proof = prove({"model_type": "deepseek_v3", "attention_bias": True, **query})
    assert proof.status == "exact", str(proof)


def test_a_softmax_that_shows_nothing_proves_nothing():
    hidden = torch.full((1, 2, 4, 4), -torch.inf)
    assert not informative(hidden)
    assert not informative(hidden.diagonal_scatter(torch.zeros(1, 2, 4), dim1=-2, dim2=-1))  # one key each
    assert not informative(torch.ones(1, 2, 4, 4))  # all alike
    assert informative(torch.randn(1, 2, 4, 4))


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
    mistyped = prove("lama")
    assert mistyped.status == "cannot be built"
    assert "did you mean llama" in mistyped.reason


def test_a_folder_is_proven_with_its_own_config(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=64).save_pretrained(tmp_path)
    assert prove(tmp_path).status == "exact"


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

    from keyquery.proof.families import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {f"extra.{n}.attn.{role}.weight": torch.randn(32, 32) for n in (0, 1) for role in ("query", "key")}
    save_file({**load_file(file), **more}, file)
    with pytest.raises(ValueError, match=r"2 attention modules are not read as llama: extra\.0\.attn and 1 more"):
        kq.read(tmp_path)
    heads = kq.read(tmp_path, partial=True)
    assert heads[0].notes == ("partial: 2 attention modules are not read: extra.0.attn and 1 more of its kind",)
    assert kq.look(tmp_path, partial=True).layers[0]["notes"] == list(heads[0].notes)


@pytest.mark.parametrize(("config", "words"), [({"model_type": 5}, "has no model_type"), ([], "is not a JSON object")])
def test_a_config_without_a_type_is_not_proven(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        prove(tmp_path)


def test_a_config_of_any_depth_ends():
    proof = prove({"model_type": "llama", "num_hidden_layers": 10**12})
    assert proof.status == "cannot be built"
    assert "a config with 1000000000000 layers is not proven" in proof.reason


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, ["prove", "gpt2", "--json", str(tmp_path / "proof.json")])
    assert done.exit_code == 0
    assert done.stdout.startswith("gpt2: exact, 2 attention modules, largest relative error")
    assert json.loads((tmp_path / "proof.json").read_text())[0]["status"] == "exact"


def test_a_folder_that_is_not_there_is_named():
    assert "there is no no/such/folder" in str(CliRunner().invoke(app, ["prove", "no/such/folder"]).exception)
