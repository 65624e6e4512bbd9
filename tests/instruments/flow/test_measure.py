"""Flow in running models: what is summed, what heads write, and that the models are left as they were."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.flow.measure import output_maps, value_norms
from keyquery.listening import attention_maps
from keyquery.listening.maps import run_with
from keyquery.proof.families import tiny_inputs, tiny_model
from tests import vision

pytest.importorskip("transformers")

LABELS = ["a"] * 4 + ["b"] * 5


def assert_same(reading, expected, *names):
    for name in names or ("raw", "residual", "corrected", "rollout", "symmetry", "special"):
        assert np.allclose(getattr(reading, name), getattr(expected, name), atol=1e-6), name


def norms_and_maps(model, batch):
    """Norms and maps of every call."""
    (outputs, reason), rows = output_maps(model), {}
    assert reason is None
    run_with(model, batch, lambda call, number: rows.update({call.name: (value_norms(outputs, call), call.weights())}))
    return rows


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "vit"])
def test_norms_are_those_of_what_the_model_writes(name):
    # Σ_j A_ij f(x_j) over all heads is what leaves the output map; its length for a lone token is that of f(x).
    model = tiny_model(name).double()
    batch = {
        key: value.double() if value.is_floating_point() else value for key, value in tiny_inputs(name, model).items()
    }
    heads = kq.read(model)
    layer, maps = heads[1], heads.values(1)
    seen = {}
    entered = model.get_submodule(next(layer.modules[role] for role in ("value", "fused") if role in layer.modules))
    left = model.get_submodule(layer.modules["output"])
    hooks = [
        entered.register_forward_pre_hook(lambda module, args: seen.update(x=args[0])),
        left.register_forward_hook(lambda module, args, out: seen.update(out=out)),
    ]
    norms, attention = norms_and_maps(model, batch)[layer.name]
    for hook in hooks:
        hook.remove()
    value = seen["x"][:, None, None] @ maps.value.mT + (0 if maps.value_bias is None else maps.value_bias.unsqueeze(-2))
    vectors = (value @ maps.output).flatten(1, 2)
    written = (attention @ vectors).sum(1) + (0 if maps.output_bias is None else maps.output_bias)
    assert torch.allclose(written, seen["out"], atol=1e-6)
    assert torch.allclose(norms, vectors.norm(dim=-1))


def test_own_layers_with_grouped_values_and_padding():
    layer = kq.Attention(16, 4, kv_heads=2).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    value = layer.value(x).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1)
    expected = (value @ layer.output.weight.mT.unflatten(0, (4, 4))).norm(dim=-1)
    assert torch.allclose(norms_and_maps(layer, {"x": x})[""][0], expected)
    x[:, 3:] = torch.nan
    norms, _ = norms_and_maps(layer, {"x": x, "mask": torch.tensor([[True] * 3 + [False] * 2])})[""]
    assert torch.allclose(norms[..., :3], expected[..., :3])
    assert not norms[..., 3:].any()


@pytest.mark.parametrize("layers", [kq.Encoder, kq.Decoder])
def test_models_are_measured_as_their_maps(layers):
    model, x = layers(16, 3, 2).double(), torch.randn(1, 9, 16, dtype=torch.float64)
    reading, maps = kq.flow(model, LABELS, inputs={"x": x}), attention_maps(model, {"x": x})
    mask = torch.ones(9, 9, dtype=torch.bool).tril() if layers is kq.Decoder else None
    assert_same(reading, kq.flow(maps, LABELS, mask=mask))
    (norms, attention) = norms_and_maps(model, {"x": x})["blocks.1.attention"]
    mass = (attention * norms[..., None, :])[0]
    crossing = mass[:, :4, 4:].sum((1, 2)) + mass[:, 4:, :4].sum((1, 2))
    assert reading.weighted[1] == pytest.approx((crossing / mass.sum((1, 2))).tolist(), abs=1e-12)
    padded = torch.cat([x, torch.full((1, 3, 16), torch.nan, dtype=torch.float64)], 1)
    batch = {"x": padded, "mask": torch.arange(12)[None] < 9}
    padding = kq.flow(model, [*LABELS, "b", "b", "b"], inputs=batch)
    assert_same(padding, reading, "raw", "residual", "corrected", "rollout", "symmetry", "weighted")


def test_one_text_or_several():
    model = vision.visual_bert()
    batch = {"input_ids": torch.tensor([[2, 6, 7, 3], [2, 8, 3, 0]]), "visual_embeds": torch.randn(2, 5, 16)}
    batch |= {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), "visual_attention_mask": torch.ones(2, 5)}
    reading = kq.flow(model, inputs=batch)
    assert np.shape(reading.raw) == (2, 2, 4)
    for text, words in ((0, 4), (1, 3)):
        alone = {"input_ids": batch["input_ids"][text : text + 1, :words]}
        alone |= {"visual_embeds": batch["visual_embeds"][text : text + 1]}
        single = kq.flow(model, inputs=alone)
        assert single.labels == ["text"] * words + ["image"] * 5
        for name in ("raw", "residual", "weighted", "corrected", "symmetry", "rollout"):
            assert np.allclose(np.array(getattr(reading, name))[:, text], getattr(single, name), atol=1e-5), name


def test_a_tower_of_as_many_tokens_is_not_mistaken_for_the_joint_one():
    # 17 tokens of the vision tower, and as many of the language model.
    model, processor = vision.llava(), vision.llava_processor()
    batch = dict(processor(images=vision.photograph(), text="<image>", return_tensors="pt"))
    batch = {name: part[:, 1:] if name != "pixel_values" else part for name, part in batch.items()}
    assert batch["input_ids"].shape[1] == 17
    reading = kq.flow(model, inputs=batch, modality=["image"] * 16 + ["text"])
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    assert_same(reading, kq.flow(attention_maps(model, batch), reading.labels, mask=mask))


def test_architectures_whose_values_are_not_read_give_the_reason():
    model = tiny_model("deepseek")
    reading = kq.flow(model, [0, 0, 0, 1, 1, 1], inputs=tiny_inputs("deepseek", model))
    assert reading.weighted is None
    assert "norm-weighted flow is not available" in reading.notes[0]


class Widths(torch.nn.Module):
    """Layers with different numbers of heads."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([kq.Attention(8, 2), kq.Attention(8, 4)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


class Crossed(torch.nn.Module):
    """One sequence attends to another, and none to itself."""

    def __init__(self):
        super().__init__()
        self.cross = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, memory):
        return self.cross(x, memory, memory)[0]


def test_models_that_cannot_be_measured():
    labels, x = ["a", "a", "b", "b"], torch.randn(1, 4, 8)
    ids = {"input_ids": torch.randint(3, 60, (2, 4))}
    with pytest.raises(ValueError, match="Linear ran without an attention call that torch shows"):
        kq.flow(torch.nn.Linear(8, 2), labels, inputs={"input": x})
    with pytest.raises(ValueError, match="Widths has layers of 2 and 4 heads: not supported"):
        kq.flow(Widths(), labels, inputs={"x": x})
    with pytest.raises(ValueError, match="Crossed returns no joint attention over all of its tokens"):
        kq.flow(Crossed(), labels, inputs={"x": x, "memory": 2 * x})
    with pytest.raises(ValueError, match="modality has 6 labels, but the attention of BertModel has 4 tokens"):
        kq.flow(tiny_model("bert"), [*labels, "a", "b"], inputs=ids)
    with pytest.raises(ValueError, match="modality has 3 rows of labels, but the attention of BertModel has 2 texts"):
        kq.flow(tiny_model("bert"), [labels] * 3, inputs=ids)
    model = tiny_model("llama")
    with (
        kq.dial(model, popularity=0.0, data=[ids], means="global"),
        pytest.raises(ValueError, match="the model is already dialled or projected: undo that first"),
    ):
        kq.flow(model, labels, inputs=ids)
