"""Configs as the hub has them: a nested config leaves out what are the defaults of its type."""

import json

import pytest
import torch

import keyquery as kq

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
TEXT = {"intermediate_size": 48, "vocab_size": 60}


def gemma3():
    text = {**TEXT, "hidden_size": 64, "num_hidden_layers": 7, "sliding_window": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return transformers.Gemma3Model(config)


def llava():
    text = transformers.LlamaConfig(**TEXT, hidden_size=256, num_hidden_layers=2).to_dict()
    vision = transformers.CLIPVisionConfig(**VISION).to_dict()
    return transformers.LlavaModel(transformers.LlavaConfig(text_config=text, vision_config=vision))


USUAL = ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
LEFT_OUT = {
    gemma3: ("layer_types", "query_pre_attn_scalar", *USUAL),
    llava: ("hidden_size", *USUAL),
}


@pytest.mark.parametrize("build", LEFT_OUT)
def test_what_a_config_leaves_out_is_the_default_of_its_type(build, tmp_path):
    build().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    whole = list(kq.read(tmp_path))
    for key in LEFT_OUT[build]:
        config["text_config"].pop(key, None)
    path.write_text(json.dumps(config))
    short = list(kq.read(tmp_path))
    assert [layer.window for layer in short] == [layer.window for layer in whole]
    assert [layer.scale for layer in short] == [layer.scale for layer in whole]
    for one, other in zip(short, whole, strict=True):
        x = torch.randn(3, one.form.dim)
        assert one.form.batch == other.form.batch
        assert (one.rope is None) == (other.rope is None)
        if one.rope is not None:
            query = one.project(x, x)[0]
            turned = (layer.rope.rotate(query, torch.arange(3) * 5) for layer in (one, other))
            torch.testing.assert_close(*turned)
