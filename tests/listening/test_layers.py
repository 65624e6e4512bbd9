"""Attention of `kq.Attention` is seen, and replaced."""

import pytest
import torch

import keyquery as kq
from tests.listening.models import REPLACEMENTS, assert_replaced, formula, randomised

LAYERS = {
    "plain": ({}, {}),
    "grouped, causal": ({"kv_heads": 2}, {"is_causal": True}),
    "rotated": ({"rope": kq.Rope(4)}, {"positions": torch.tensor([3, 0, 1, 7, 2])}),
    "padded": ({"kv_heads": 1}, {"mask": torch.tensor([[True] * 5, [False, False, True, True, True]])}),
    "padded, causal": ({}, {"mask": torch.tensor([[True] * 5, [True, True, True, False, False]]), "is_causal": True}),
    "pairs": ({}, {"mask": torch.ones(5, 5).triu(-1).bool()[None].expand(2, 5, 5)}),
    "kernel": ({"kernel": "rbf"}, {"is_causal": True}),
}


@pytest.mark.parametrize("replacement", [None, *REPLACEMENTS])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_ours_go_on_with_what_was_replaced(name, replacement):
    options, arguments = LAYERS[name]
    layer = randomised(kq.Attention(16, 4, **options))
    x = torch.randn(2, 5, 16).double()
    if replacement is not None:
        assert_replaced(replacement, layer, layer, layer.output, lambda: layer(x, **arguments))
        return
    with torch.no_grad(), kq.listen(layer) as calls:
        out = layer(x, **arguments)
    (call,) = calls
    assert (call.heads, call.key_heads) == (4, options.get("kv_heads", 4))
    assert call.is_causal == ("causal" in name or name == "kernel")
    torch.testing.assert_close(layer.output(formula(call, {}).transpose(1, 2).flatten(2)), out, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(call.output(), formula(call, {}), atol=1e-10, rtol=1e-9)
