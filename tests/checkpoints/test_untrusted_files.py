"""Models that are not quite as expected: unknown types, towers, shards of other kinds, and files with holes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import keyquery as kq

pytest.importorskip("transformers", reason="the models need the extra hf")

from keyquery.proof.families import tiny_model
from keyquery.proof.models import build, tiny_configs


def test_a_known_type_keeps_all_its_towers():
    assert {layer.name.split(".")[0] for layer in kq.read(tiny_model("clip"))} == {"text_model", "vision_model"}


def test_an_unknown_type_is_read_by_names_and_says_so(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = kq.read(tmp_path, config={**config, "model_type": "frobnicate"})
    words = "unproven: model type 'frobnicate' is not known: read as llama by its tensor names; scale and norms may"
    assert all(layer.notes[0].startswith(words) for layer in heads)
    strange = kq.read(tmp_path, config={**config, "model_type": "bert"})
    assert strange[0].notes[0].startswith("unproven: model type 'bert' does not fit its tensors: read as")
    assert kq.read(tmp_path)[0].notes == ()
    assert kq.look(tmp_path, config={**config, "model_type": "frobnicate"}).layers[1]["notes"] == list(heads[1].notes)


@pytest.fixture
def llama(tmp_path):
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tensors(llama):
    return load_file(llama / "model.safetensors")


def sharded(folder, tensors, named=()):
    """As transformers wrote large models before safetensors."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in parts.items() for name in part} | dict(named)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


def test_torch_shards_are_read_as_one_file(llama, tensors):
    whole = [layer.form for layer in kq.read(llama)]
    sharded(llama, tensors)
    for layer, form in zip(kq.read(llama), whole, strict=True):
        assert torch.equal(layer.form.query, form.query)
        assert torch.equal(layer.form.key, form.key)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"a": "gone.bin"}, r"lacks the shard gone\.bin"),
        ({"a": "../b.bin"}, "not a file in it: refused"),
        ({"a": "pytorch_model-00001-of-00002.bin"}, r"names a, which pytorch_model-00001-of-00002\.bin does not hold"),
        ({"a": "config.json"}, r"must name safetensors or torch files, got \.bin, \.json"),
    ],
)
def test_torch_shards_are_checked(named, words, llama, tensors):
    sharded(llama, tensors, named)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        kq.read(llama)


HOLES = {
    "the first query": ("layers.0.self_attn.q_proj.weight", None),
    "a query between others": ("layers.1.self_attn.q_proj.weight", None),
    "the last query": ("layers.2.self_attn.q_proj.weight", None),
    "a key": ("layers.0.self_attn.k_proj.weight", None),
    "a bias of another size": ("layers.0.self_attn.q_proj.bias", torch.zeros(5)),
    "a norm of another size": ("layers.1.input_layernorm.weight", torch.zeros(5)),
    "a norm that is not finite": ("layers.1.input_layernorm.weight", torch.tensor([1.0] * 31 + [torch.nan])),
    "short floats": ("layers.1.self_attn.k_proj.weight", torch.zeros(16, 32).to(torch.float8_e4m3fn)),
    "integers": ("layers.1.self_attn.k_proj.weight", torch.zeros(16, 32, dtype=torch.int8)),
    "a query of another width": ("layers.1.self_attn.q_proj.weight", torch.zeros(32, 16)),
    "a key of three dimensions": ("layers.1.self_attn.k_proj.weight", torch.zeros(1, 16, 32)),
    "a key of other heads": ("layers.1.self_attn.k_proj.weight", torch.zeros(7, 32)),
}
WORDS = {
    "a query of another width": r"q_proj: keys of width 32 beside queries of width 16",
    "a key of three dimensions": r"k_proj\.weight has the shape \(1, 16, 32\), expected 2 dimensions",
    "a key of other heads": r"k_proj: 7 rows are not heads of width 8",
    "a bias of another size": r"q_proj\.bias has 5 values, but its weights have 32 rows",
    "a norm of another size": r"layers\.1\.input_layernorm\.weight has 5 values, expected 32",
    "a norm that is not finite": r"layers\.1\.input_layernorm\.weight: 1 of 32 values are NaN or infinite",
    "short floats": r"layers\.1\.self_attn\.k_proj\.weight is stored as float8_e4m3fn without scales",
    "integers": "is stored as int8 without scales, which is not read: expected .*weight_scale",
}


@pytest.mark.parametrize("case", HOLES)
def test_what_is_missing_or_wrong_is_named(case, llama, tensors):
    name, value = HOLES[case]
    tensors.pop(name, None)
    save_file(tensors if value is None else {**tensors, name: value}, llama / "model.safetensors")
    with pytest.raises(ValueError, match=WORDS.get(case, rf"lacks {name}".replace(".", r"\."))):
        list(kq.read(llama))


LIES = {
    "more heads": (
        {"num_attention_heads": 8},
        r"q_proj\.weight of shape \(32, 32\) holds 8 heads of width 4, but .* is 8",
    ),
    "fewer heads": (
        {"num_attention_heads": 2},
        r"q_proj\.weight .* 2 heads of width 16, but the config's head_dim is 8",
    ),
    "heads that do not fit": ({"num_attention_heads": 5}, r"layers\.0\.self_attn\.q_proj: 32 rows are not 5 heads"),
    "no heads": ({"num_attention_heads": 0}, "the config's num_attention_heads must be at least 1, got 0"),
    "a word": ({"num_attention_heads": "four"}, "num_attention_heads must be an integer, got 'four'"),
    "key heads": (
        {"num_key_value_heads": 4},
        r"k_proj\.weight of shape \(16, 32\) holds 2 heads of width 8, but the config's num_key_value_heads is 4",
    ),
    "head width": ({"head_dim": 16}, r"4 heads of width 8, but the config's head_dim is 16"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_config_that_lies_about_its_heads_is_refused(case, llama):
    changes, words = LIES[case]
    config = json.loads((llama / "config.json").read_text())
    with pytest.raises(ValueError, match=words) as error:
        list(kq.read(llama, config={**config, **changes}))
    assert "\n" not in str(error.value)


def test_an_unknown_hybrid_may_have_layers_without_attention(llama, tensors):
    """Its layers in between may be of another kind."""
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.self_attn" not in name}
    save_file(kept, llama / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    assert [layer.name for layer in kq.read(llama, config={**config, "model_type": "hybrid"})] == [
        "layers.0.self_attn",
        "layers.2.self_attn",
    ]


@pytest.mark.parametrize("number", ["00", "01", "٣", "1" * 5000])
def test_layers_that_are_numbered_otherwise_are_refused(number, tmp_path):
    """Also where other layers are as they should be: a model without some of its layers would be another model."""
    for others in ((), ("0", "1")):
        names = [f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in (number, *others) for role in "qk"]
        save_file({name: torch.randn(8, 8) for name in names}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"is a tensor of layer '.*': expected a number such as 0 or 12"):
            kq.read(tmp_path / "model.safetensors", heads=2)


def test_a_tower_can_be_run_on_data():
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    model = build(next(tiny_configs(config)))
    reading = kq.look(model, inputs=[{"input_ids": torch.randint(3, 50, (2, 7))}])
    expected = {"tokens": 14, "length": 7, "from": "inputs"}
    assert expected.items() <= reading.provenance["data"].items()
    with_data = {head["layer"] for head in reading.heads if head.get("on_data")}
    assert [layer.causal for layer in kq.read(model)] == [layer.index in with_data for layer in kq.read(model)]
