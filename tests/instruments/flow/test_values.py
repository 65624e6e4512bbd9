"""Norms of what heads carry are those of the vectors that leave the output map."""

import pytest
import torch

import keyquery as kq
from keyquery.instruments.flow.values import OutputMaps
from keyquery.listening.maps import run_with
from keyquery.proof.families import tiny_inputs, tiny_model

pytest.importorskip("transformers")


def norms_and_maps(model, batch):
    """Norms and maps of every call."""
    outputs, rows = OutputMaps.of(model), {}
    assert outputs.reason is None
    run_with(model, batch, lambda call, number: rows.update({call.name: (outputs.norms(call), call.weights())}))
    return rows


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gpt_neox", "vit"])
def test_what_is_carried_is_what_the_model_writes(name):
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


def test_what_own_layers_carry():
    layer = kq.Attention(16, 4, kv_heads=2).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    norms, _ = norms_and_maps(layer, {"x": x})[""]
    value = layer.value(x).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1)
    output = layer.output.weight.mT.unflatten(0, (4, 4))
    assert torch.allclose(norms, (value @ output).norm(dim=-1))


def test_padding_carries_nothing():
    layer = kq.Attention(16, 4).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    x[:, 3:] = torch.nan
    norms, _ = norms_and_maps(layer, {"x": x, "mask": torch.tensor([[True] * 3 + [False] * 2])})[""]
    assert (norms[..., :3] > 0).all()
    assert not norms[..., 3:].any()
