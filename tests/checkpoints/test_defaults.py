"""Configs that leave out what is a default of their type, and models of several towers."""

import json
from pathlib import Path

import pytest
import torch

import keyquery as kq
from keyquery.checkpoints.configs.defaults import completed
from keyquery.checkpoints.configs.towers import towers
from keyquery.checkpoints.configs.types import known
from keyquery.checkpoints.family import families_of


def test_what_is_stated_stays():
    config = {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2, "rope_theta": 5e5}
    full = completed(config)
    assert {key: full[key] for key in config} == config
    assert full["num_attention_heads"] == 32
    assert completed({"model_type": "frobnicate", "a": 1}) == {"model_type": "frobnicate", "a": 1}


def test_older_names_of_a_value_are_not_overruled():
    assert "rope_theta" not in completed({"model_type": "gpt_neox", "rotary_emb_base": 7.0})
    assert "partial_rotary_factor" not in completed({"model_type": "gpt_neox", "rotary_pct": 1.0})
    # Qwen2-VL's files have the values of the language tower outside of its section.
    flat = completed({"model_type": "qwen2_vl", "hidden_size": 64, "num_attention_heads": 4, "vision_config": {}})
    assert flat["text_config"]["num_attention_heads"] == 4
    assert flat["text_config"]["model_type"] == "qwen2_vl_text"


def test_kinds_of_layers_repeat():
    full = completed({"model_type": "gemma3_text", "num_hidden_layers": 7})["layer_types"]
    assert full == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    # A period that differs from the default's is not guessed.
    assert "layer_types" not in completed({"model_type": "cohere2", "sliding_window_pattern": 3})


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "llava", "cohere2", "phi", "t5", "modernbert", "gpt_oss", "siglip"]
)
def test_defaults_are_those_of_transformers(name):
    config = pytest.importorskip("transformers").CONFIG_MAPPING[name]().to_dict()

    def check(ours, theirs):
        for key, value in ours.items():
            if isinstance(value, dict) and "model_type" in value:
                check(value, theirs[key])
            elif key == "rope_parameters" and "rope_type" in value and "rope_theta" in ours:
                assert theirs[key] == {"rope_theta": ours["rope_theta"], **value}
            elif key in theirs and key != "rope_theta":
                assert theirs[key] == value, key
        rope = theirs.get("rope_parameters") or {}
        if "rope_theta" in ours and "rope_theta" in rope:
            assert ours["rope_theta"] == rope["rope_theta"]

    check(completed({"model_type": name}), config)
    assert known(name).defaults


def test_a_sparse_file_is_read_like_a_full_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.PhiConfig(hidden_size=256, intermediate_size=64, num_hidden_layers=2, vocab_size=60)
    transformers.PhiModel(config).save_pretrained(tmp_path)
    full = kq.read(tmp_path)[0]
    sizes = {"hidden_size": 256, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi", **sizes}))
    sparse = kq.read(tmp_path)[0]
    assert sparse.heads == full.heads == 32
    assert (sparse.rope.dims, sparse.rope.base) == (full.rope.dims, full.rope.base)  # half of each head, as Phi does
    assert torch.equal(sparse.form.query, full.form.query)


def test_towers_are_told_apart_by_the_first_word():
    section = {"model_type": "x"}
    config = {"text_config": section, "vision_config": section, "audio_config": section, "size": 3}
    names = ["model.visual.text_proj.q", "model.language_model.image.q", "model.audio_tower.q", "lm_head.q"]
    owned = {key: list(tensors) for key, tensors in towers(dict.fromkeys(names), config).items()}
    assert owned == {"text_config": [names[1]], "vision_config": [names[0]], "audio_config": [names[2]]}
    assert list(towers({"layers.0.q": 0, "vision.q": 0}, config)["text_config"]) == ["layers.0.q"]


def test_a_composite_model_is_read_tower_by_tower():
    pytest.importorskip("transformers")
    from keyquery.proof.proof import prove

    proof = prove("voxtral")
    assert (proof.status, proof.family, len(proof.modules)) == ("exact", "composite", 4), str(proof)


def test_every_exact_type_of_the_page_is_named_by_its_architecture():
    page = Path(__file__).parent.parent.parent / "docs" / "architectures.md"
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines() if "exact |" in line
    ]
    exact = [(row[0], row[3]) for row in rows if len(row) == 6]
    assert len(exact) > 600
    assert [name for name, family in exact if family not in [known.name for known in families_of(name)]] == []
