"""What a config says about positions, against the masks and rotary modules that transformers builds of it."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

import transformers

import keyquery as kq
from keyquery.proof.families import tiny_model

LENGTH = 14
SOME = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
WINDOWED = {
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral, none": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "qwen2": ("qwen2", SOME),
    "qwen2, none": ("qwen2", {**SOME, "use_sliding_window": False}),
    "gemma2": ("gemma2", {"sliding_window": 5, "num_hidden_layers": 3}),
    "gemma3": ("gemma3", {"sliding_window": 5, "num_hidden_layers": 7}),
    "gemma3, both ways": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 7, "use_bidirectional_attention": True}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 5, "num_hidden_layers": 3}),
    "modernbert": ("modernbert", {"local_attention": 8, "num_hidden_layers": 4}),
    "gpt_neo": ("gpt_neo", {"window_size": 5, "attention_types": [[["global", "local"], 1]]}),
}
# How configs said it before they had `layer_types`, and what they then left unsaid.
OLD = {
    "gemma3": {"sliding_window_pattern": 6},
    "gemma3, both ways": {"sliding_window_pattern": 6},
    "modernbert": {"global_attn_every_n_layers": 2},
}


def what_is_seen(model):
    """Which keys each query of each layer gives weight to, by the model's own attention maps."""
    ids = torch.randint(3, 60, (1, LENGTH))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [weights[0].amax(0) > 0 for weights in model(ids, output_attentions=True).attentions]


def seen_by_us(layer):
    offsets = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    near = offsets.abs() < (layer.window or LENGTH)
    return near & (offsets <= 0) if layer.causal else near


@pytest.mark.parametrize("case", WINDOWED)
def test_windows_are_those_of_the_model(case, tmp_path):
    name, changes = WINDOWED[case]
    model = tiny_model(name, **changes)
    seen = what_is_seen(model)
    model.save_pretrained(tmp_path)
    for heads in (kq.read(model), kq.read(tmp_path)):
        for layer, expected in zip(heads, seen, strict=True):
            assert torch.equal(seen_by_us(layer), expected), layer.name
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)
    for layer, expected in zip(kq.read(tmp_path, config={**config, **OLD.get(case, {})}), seen, strict=True):
        assert torch.equal(seen_by_us(layer), expected), layer.name


LONGER = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0] * 4}
ROPES = {
    "scaling without a base": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    "scaling without any base": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "the old scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    "both": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
    "yarn, length outside": {"rope_parameters": {**YARN, "rope_theta": 10000.0}, **LONGER},
    "yarn, length outside and inside": {"rope_scaling": {**YARN, "original_max_position_embeddings": 32}, **LONGER},
    "yarn, no length": {"rope_scaling": YARN, "max_position_embeddings": 256},
    "yarn, no factor": {
        "rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 64},
        "max_position_embeddings": 512,
    },
    "llama3, no length": {"rope_scaling": LLAMA3, "max_position_embeddings": 128},
    "longrope": {"rope_scaling": LONG, **LONGER},
}


@pytest.mark.parametrize("case", ROPES)
@pytest.mark.filterwarnings("ignore")
def test_frequencies_are_those_of_the_model(case, tmp_path):
    """The config as it lies on disk, read by transformers and by us."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = {"model_type": "llama", "vocab_size": 60, **size, **ROPES[case]}
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    rotary = transformers.LlamaModel(transformers.LlamaConfig.from_pretrained(tmp_path)).rotary_emb
    rope = kq.read(tmp_path)[0].rope
    torch.testing.assert_close(rope.frequencies.float(), rotary.inv_freq.float())
    assert rope.factor == pytest.approx(rotary.attention_scaling)


CONFIG = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 32}
WRONG = {
    "fields missing": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lack low_freq_factor|lack original"),
    "no object": ({"rope_scaling": [1, 2]}, r"must be an object, got \[1, 2\]"),
    "no number": ({"rope_theta": "x"}, "rotary positions cannot be read: could not convert"),
    "few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        "short_factor must have 4 values, got 1",
    ),
    "few kinds": (
        {"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": ["full_attention"]},
        "layer_types must name every layer.*no layer 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_positions_are_named(case, tmp_path):
    changes, words = WRONG[case]
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        list(kq.read(tmp_path, config={**CONFIG, **changes}))
