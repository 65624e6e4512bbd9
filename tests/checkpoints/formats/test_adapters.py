"""LoRA adapters: W + (α/r)·B·A, by the formula, and against what PEFT itself merges."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import keyquery as kq

pytest.importorskip("transformers", reason="the models need the extra hf")

from keyquery.cli import app
from keyquery.proof.families import tiny_model

MODULE = "base_model.model.model.layers.{}.self_attn.{}_proj"


@pytest.fixture
def base(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapter(folder, ranks=(3, 2), only=("q", "k"), replaced=(), **facts):
    """Random A and B for both layers, in PEFT's files; returns its folder and the tensors."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    tensors = {}
    for layer, rank in enumerate(ranks):
        for role in only:
            name = MODULE.format(layer, role)
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 32)
            tensors[f"{name}.lora_B.weight"] = torch.randn(32 if role == "q" else 16, rank)
            if facts.get("use_dora"):
                tensors[f"{name}.lora_magnitude_vector"] = torch.rand(32 if role == "q" else 16) + 1
    save_file({**tensors, **dict(replaced)}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "base_model_name_or_path": "org/base", **facts}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, tensors


def weights(heads):
    return [(layer.weights.query.flatten(0, 2), layer.weights.key.flatten(0, 2)) for layer in heads]


SCALES = {
    "plain": ({}, (6 / 3, 6 / 2)),
    "rank-stabilised": ({"use_rslora": True}, (6 / 3**0.5, 6 / 2**0.5)),
    "a module's own": ({"alpha_pattern": {r"layers.1.self_attn.q_proj": 5, "layers.1.self_attn.k_proj": 5}}, (2, 2.5)),
}


@pytest.mark.parametrize("case", SCALES)
def test_the_weights_are_those_of_the_formula(case, base, tmp_path):
    facts, scales = SCALES[case]
    folder, tensors = adapter(tmp_path / "adapter", **facts)
    for layer, (plain, given) in enumerate(
        zip(weights(kq.read(base)), weights(kq.read(base, adapter=folder)), strict=True)
    ):
        for role, before, after in zip("qk", plain, given, strict=True):
            name = MODULE.format(layer, role)
            change = tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
            torch.testing.assert_close(after.double(), before.double() + scales[layer] * change, rtol=1e-5, atol=1e-5)


def test_dora_sets_the_norm_of_each_output(base, tmp_path):
    folder, tensors = adapter(tmp_path / "adapter", use_dora=True)
    for layer, given in enumerate(weights(kq.read(base, adapter=folder))):
        for role, weight in zip("qk", given, strict=True):
            magnitude = tensors[f"{MODULE.format(layer, role)}.lora_magnitude_vector"]
            torch.testing.assert_close(torch.linalg.vector_norm(weight, dim=1), magnitude)
    assert kq.read(base, adapter=folder)[0].notes == ("adapter: DoRA of rank 3",)


def test_what_an_adapter_leaves_alone_is_the_base_s(base, tmp_path):
    folder, _ = adapter(tmp_path / "adapter", only=("q",))
    comparison = kq.compare(kq.look(base), kq.look(base, adapter=folder))
    assert [row["model"]["name"] for row in comparison.readings] == ["base", "base + adapter"]
    assert torch.equal(kq.read(base)[1].form.key, kq.read(base, adapter=folder)[1].form.key)
    assert kq.look(base, adapter=folder).layers[1]["notes"] == ["adapter: LoRA of rank 2"]


def test_saved_modules_replace_the_base_s(base, tmp_path):
    norm = {"base_model.model.model.layers.0.input_layernorm.weight": torch.full((32,), 7.0)}
    folder, _ = adapter(tmp_path / "adapter", replaced=norm)
    assert torch.equal(kq.read(base, adapter=folder)[0].norm.gain, torch.full((32,), 7.0))


def test_on_a_quantised_base(base, tmp_path):
    """A QLoRA: the base's weights are dequantised, then the adapter is added."""
    tensors = load_file(base / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.tensor(1.0)
    save_file(tensors, base / "model.safetensors")
    folder, parts = adapter(tmp_path / "adapter")
    module = MODULE.format(0, "q")
    change = 2 * parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
    layer = kq.read(base, adapter=folder)[0]
    torch.testing.assert_close(layer.weights.query.flatten(0, 2), tensors[name].float() + change)
    assert layer.notes == ("weights: fp8 e4m3 per tensor", "adapter: LoRA of rank 3")


REFUSED = {
    "another type": ({"peft_type": "IA3"}, r"is an adapter of type 'IA3'; LORA is supported"),
    "replication": ({"layer_replication": [[0, 2]]}, "is a LoRA with layer_replication, which is not supported"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4', which changes the base too"),
    "more layers": (
        {"ranks": (2, 2, 2)},
        r"changes model\.layers\.2\.self_attn\.[qk]_proj\.weight, which .* not have",
    ),
    "alpha": ({"lora_alpha": "much"}, "lora_alpha must be a number, got 'much'"),
    "endless alpha": ({"lora_alpha": 10**400}, "lora_alpha must be a number, got 1000"),
    "pattern": ({"alpha_pattern": {"(a+)+$": 3}}, "names of modules are supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case, base, tmp_path):
    facts, words = REFUSED[case]
    folder, _ = adapter(tmp_path / "adapter", **facts)
    with pytest.raises(ValueError, match=words) as error:
        kq.read(base, adapter=folder)
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_base_is_named(tmp_path):
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    folder, _ = adapter(tmp_path / "adapter")
    words = r"_proj\.weight of shape \(.*, 32\), and .*_proj\.weight of .* has the shape \(.*, 64\): .*, org/base"
    with pytest.raises(ValueError, match=words):
        kq.read(tmp_path / "base", adapter=folder)


def test_a_missing_half_is_named(base, tmp_path):
    folder, tensors = adapter(tmp_path / "adapter")
    tensors.pop(f"{MODULE.format(1, 'k')}.lora_B.weight")
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.lora_B"):
        kq.read(base, adapter=folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        kq.read(base, adapter=folder)
    with pytest.raises(FileNotFoundError, match=r"adapter must be a folder with adapter_config\.json"):
        kq.read(base, adapter=base)


def test_on_the_command_line(base, tmp_path):
    folder, _ = adapter(tmp_path / "adapter")
    out = tmp_path / "a.json"
    done = CliRunner().invoke(app, ["look", str(base), "--adapter", str(folder), "--json", str(out), "--quiet"])
    assert done.exit_code == 0, done.output
    assert kq.Reading.load(out).model["name"] == "base + adapter"


def test_biases_of_an_adapter_count_where_the_base_has_none(base, tmp_path):
    bias = torch.randn(32)
    replaced = {f"{MODULE.format(1, 'q')}.bias": bias}
    folder, _ = adapter(tmp_path / "adapter", replaced=replaced, bias="lora_only")
    before, after = kq.read(base), kq.read(base, adapter=folder)
    assert [layer.weights.query_bias is None for layer in (*before, *after)] == [True, True, True, False]
    torch.testing.assert_close(after[1].weights.query_bias.flatten(), bias)
