"""Layers that know their own form are read like any checkpoint."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.layers import LanguageModel, Shape
from keyquery.layers.kernels import KERNELS
from keyquery.listening.inputs.load import load_model


def test_a_live_model_reads_like_its_file():
    model, _ = load_model(kq.models.DECODER)
    for live, disk in zip(kq.read(model), kq.read(kq.models.DECODER), strict=True):
        assert (live.causal, live.scale, live.kind, live.name) == (disk.causal, disk.scale, disk.kind, disk.name)
        for view in ("form", "folded"):
            one, other = getattr(live, view), getattr(disk, view)
            assert torch.allclose(one.dense(), other.to(torch.float32).dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rope", [False, True])
def test_projections_are_those_of_the_layer(kernel, rope):
    model = LanguageModel(Shape(vocab_size=20, width=16, depth=2, kernel=kernel, rope=rope, causal=True)).double()
    for weight in model.parameters():
        nn.init.normal_(weight)
    layer, x = kq.read(model)[1], torch.randn(5, 16, dtype=torch.float64)
    query, key = model.body.blocks[1].attention.queries_and_keys(x[None])
    ours = layer.project(x)
    assert torch.allclose(ours[0].squeeze(1), query[0], atol=1e-12)
    assert torch.allclose(ours[1].squeeze(1), key[0], atol=1e-12)
    assert layer.causal
    assert (layer.rope is not None) == rope
    assert bool(layer.notes) == (kernel == "rbf")


def test_grouped_layers_and_their_output_maps():
    module = kq.Attention(12, heads=4, kv_heads=2).double()
    heads = kq.read(module)
    assert heads[0].form.batch == (2, 2)
    value = module.value.weight.unflatten(0, (2, 3))
    out = module.output.weight.mT.unflatten(0, (4, 3))
    assert torch.allclose(next(heads.output).dense()[1, 0], out[2].mT @ value[1])


def test_instruments_see_what_a_kernel_is():
    model = LanguageModel(Shape(vocab_size=20, width=16, depth=1, kernel="skew"))
    reading = kq.look(model, inputs=[{"input_ids": torch.randint(20, (4, 12))}])
    assert all(head["raw"]["symmetry"] == pytest.approx(-1) for head in reading.heads)
    assert all(head["on_data"]["symmetry"] == pytest.approx(-1) for head in reading.heads)


def test_a_model_of_two_kinds_of_layers_lists_both_in_order():
    layers = [nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(11)]
    model = nn.ModuleDict({"stack": nn.ModuleList(layers)})
    before = list(kq.read(model))
    model.stack[9].self_attn = kq.Attention(16, 4)
    after = kq.read(model)
    assert [layer.name for layer in after] == [layer.name for layer in before]
    assert [layer.index for layer in after] == list(range(11))
    torch.testing.assert_close(after[10].form.dense(), before[10].form.dense())
    torch.testing.assert_close(after[9].form.dense(), model.stack[9].self_attn.form().dense())
    assert len(list(after.output)) == 11
    assert after.values(0).value.shape == (4, 1, 4, 16)
    with pytest.raises(ValueError, match=r"stack\.9\.self_attn: its values are read as its output map alone"):
        after.values(9)
