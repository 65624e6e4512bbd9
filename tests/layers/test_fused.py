"""attend: narrow heads that are padded on a CPU, against softmax(scale·qkᵀ)v written out in float64."""

import pytest
import torch

from keyquery.layers.fused import attend

SHAPES = [(5, 64, 64), (8, 97, 65), (15, 65, 130), (1, 64, 63), (16, 70, 70), (8, 3, 200)]  # width, queries, keys


def plainly(query, key, value, scale, real, is_causal):
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = scale * query @ key.mT
    n, m = scores.shape[-2:]
    hidden = (
        torch.zeros(n, m, dtype=torch.bool) if not is_causal else torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    )
    if real is not None:
        hidden = hidden | ~real[:, None, None]
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("width", "n", "m"), SHAPES)
def test_outputs_and_gradients_of_narrow_heads(width, n, m, is_causal, masked):
    if is_causal and m < n:
        m = n
    generator = torch.Generator().manual_seed(width)
    parts = [torch.randn(2, heads, size, width, generator=generator) for heads, size in ((4, n), (2, m), (2, m))]
    weights = torch.randn(2, 4, n, width, generator=generator)
    real = torch.rand(2, m, generator=generator) < 0.8 if masked else None
    if real is not None:
        real[:, 0] = True  # so that every query sees a key
    results = []
    for dtype, way in ((torch.float32, lambda *a: attend(*a)[0]), (torch.float64, plainly)):
        own = [part.to(dtype).requires_grad_() for part in parts]
        out = way(*own, 0.3, real, *((None, is_causal) if way is not plainly else (is_causal,)))
        assert out.shape == weights.shape
        results.append([out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), own)])
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).abs().max() < 2e-6 * max(1.0, float(exact.abs().max()))
