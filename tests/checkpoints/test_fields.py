"""Fields of configs and tensors of attention that no reading is proven for: refused by name, or labelled."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery.checkpoints.configs import fields
from keyquery.checkpoints.configs.defaults import completed
from keyquery.checkpoints.configs.fields import flat, unproven_fields
from keyquery.checkpoints.configs.types import Known
from keyquery.cli import app

pytest.importorskip("transformers", reason="the models need the extra hf")

from keyquery.proof.families import tiny_model


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama."""
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def state(folder, **facts):
    """Change a config, as of a newer transformers."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "transformers_version": "99.0", **facts}))


@pytest.mark.parametrize(
    ("name", "facts", "unread"),
    [
        ("falcon", {"alibi": True, "new_decoder_architecture": False}, r"alibi = True \(proven: False\)"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
            r"rope\.rope_type = 'spiral' \(proven: ",
        ),
        ("llama", {"attention_sinkhorn": 3}, r"attention_sinkhorn = 3 \(no field of its type when"),
    ],
)
def test_a_value_that_is_not_proven_is_refused_by_its_name(name, facts, unread, tmp_path):
    tiny_model(name).save_pretrained(tmp_path)
    state(tmp_path, **facts)
    with pytest.raises(ValueError, match=rf"would be read without the config's {unread}.*unproven=True \(--unproven\)"):
        kq.read(tmp_path)


def test_what_is_read_all_the_same_is_labelled_everywhere(folder):
    state(folder, attention_sinkhorn=3)
    label = "unproven: the config's attention_sinkhorn = 3 (no field of its type when that was proven) is not read"
    assert all(label in layer.notes for layer in kq.read(folder, unproven=True))
    assert label in str(kq.look(folder, unproven=True).to_dict())
    refused, read = (CliRunner().invoke(app, ["look", str(folder), *more]) for more in ([], ["--unproven"]))
    assert refused.exit_code == 1
    assert (read.exit_code, "attention_sinkhorn" in read.output) == (0, True)


@pytest.mark.parametrize(
    "facts",
    [
        {"attention_sinkhorn": None},  # off
        {"attention_sinkhorn": 3, "transformers_version": "4.20.1"},  # models of newer ones do not look at it
        {"trained_on": "a corpus", "attention_dropout": 0.3},  # nothing that could move scores
        {"rms_norm_eps": 3e-5, "rope_theta": 123.0, "num_key_value_heads": 2},  # numbers, of fields that are read
    ],
)
def test_what_moves_nothing_or_is_read_is_not_refused(facts, folder):
    state(folder, **facts)
    assert [note for layer in kq.read(folder) for note in layer.notes] == []


def test_values_that_are_read_alone_and_not_together_are_refused_together(monkeypatch):
    known = Known({}, {"a": None, "b": None}, frozenset({"model_type"}), ({"a": 1, "b": 2},))
    monkeypatch.setattr(fields, "known", lambda name: known)
    assert unproven_fields({"model_type": "x", "a": 1, "b": 3}) == []
    assert unproven_fields({"model_type": "x", "a": 1, "b": 2}) == ["a = 1 (not with b = 2)"]
    assert unproven_fields({"model_type": "y", "tower": {"model_type": "x", "a": 1, "b": 2}}) == [
        "tower.a = 1 (not with b = 2)"
    ]


def test_a_switch_that_leaves_no_softmax_to_compare_is_not_proven():
    assert unproven_fields({"model_type": "deberta", "talking_head": True}) == ["talking_head = True (proven: None)"]


def test_rotary_fields_have_one_name():
    old = {"rope_scaling": {"type": "su", "factor": 2}, "rope_theta": 3}
    new = {"rope_parameters": {"full_attention": {"rope_type": "longrope", "factor": 2}}, "rope_theta": 3}
    assert dict(flat(old)) == dict(flat(new)) == {"rope.rope_type": "longrope", "rope.factor": 2, "rope_theta": 3}


def test_what_models_do_not_look_at_is_left_out_of_files_and_live_models_alike(tmp_path):
    """Llama's rotations are of all dimensions, whatever its config says."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    kq.testing.check_family("llama", rope_parameters=rope)
    model = tiny_model("llama", rope_parameters=rope)
    model.save_pretrained(tmp_path)
    assert kq.read(model)[0].rope.dims == kq.read(tmp_path)[0].rope.dims == 8


@pytest.mark.parametrize("name", ["q_norm.weight", "rotary.temperature", "q_bias"])
def test_a_tensor_of_attention_that_is_not_read_refuses_the_file(name, folder):
    file, full = folder / "model.safetensors", f"layers.1.self_attn.{name}"
    tensors = load_file(file)
    others = {"layers.1.mlp.q_norm.weight": torch.ones(8), "layers.1.self_attn.rotary.inv_freq": torch.ones(4)}
    save_file(tensors | others, file)
    assert len(kq.read(folder)) == 2
    save_file(tensors | {full: torch.ones(8)}, file)
    with pytest.raises(ValueError, match=rf"would be read without {full} of its attention"):
        kq.read(folder)
    label = f"unproven: {full} of its attention is not read"
    assert [label in layer.notes for layer in kq.read(folder, unproven=True)] == [True, True]


def test_data_beyond_the_positions_that_are_read_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=8)
    assert kq.read(model)[0].context == 8
    batch = torch.randint(3, 60, (2, 9))
    kq.look(model, inputs=[{"input_ids": batch[:, :8]}])
    with pytest.raises(ValueError, match="scores positions from 8 on in another way, which is not read, and the data"):
        kq.look(model, inputs=[{"input_ids": batch}])


LONG = {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
RELEASED = {  # what configs of released models say beside sizes, with what only older models looked at
    "llama": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5, "pretraining_tp": 1},
    "gemma2": {"attn_logit_softcapping": 50.0, "sliding_window": 4096, "sliding_window_size": 4096},
    "phi3": {"original_max_position_embeddings": 4096, "rope_scaling": LONG, "sliding_window": 262144},
    "deepseek_v3": {"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}, "moe_layer_freq": 1},
    "bloom": {"attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "offset_alibi": 100, "n_head": 16},
    "starcoder2": {"attention_softmax_in_fp32": True, "norm_type": "layer_norm", "sliding_window": 4096},
    "gptj": {"rotary": True, "rotary_dim": 64, "scale_attn_weights": True},
    "deberta-v2": {"pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    "deberta": {"talking_head": False, "pos_att_type": "c2p|p2c", "relative_attention": True},
    "modernbert": {"global_rope_theta": 160000.0, "local_attention": 128, "position_embedding_type": "absolute"},
    "mpt": {"attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "qk_ln": False}},
    "qwen2_vl_text": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "use_sliding_window": False},
    "llama4_text": {"no_rope_layers": [], "use_qk_norm": True, "attn_temperature_tuning": 4, "floor_scale": 8192},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "falcon_h1": {"key_multiplier": 0.39, "attention_out_multiplier": 0.9375, "mamba_norm_before_gate": False},
}


@pytest.mark.parametrize("name", RELEASED)
def test_configs_of_released_models_are_not_refused(name):
    assert unproven_fields(completed({"model_type": name, "transformers_version": "4.57.1", **RELEASED[name]})) == []
