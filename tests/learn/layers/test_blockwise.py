"""Attention by blocks of scores in float32, against float64; in Triton's interpreter without a GPU."""

import pytest
import torch

import keyquery as kq
from keyquery.learn.layers import cpu_dropout

pytest.importorskip("triton")
blockwise = pytest.importorskip("keyquery.learn.layers.blockwise")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# All at once, two heads at a time, and blocks of four queries of one head, the last of them smaller.
CELLS = [10**6, 2 * 7 * 300, 4 * 300]


def parts(n=7, m=300, heads=3):
    torch.manual_seed(0)
    shapes = ((1, n, heads, 5), (1, m, heads, 5), (1, m, heads, 4))
    tensors = [torch.randn(shape, device=DEVICE).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.few(1)
def test_without_dropout_it_is_attention_and_its_gradients(cells, monkeypatch):
    monkeypatch.setattr(blockwise, "CELLS", cells)
    given = parts()
    out = blockwise.attend(*given, 1.7, 0.0)
    weight = torch.randn(4, 7, 3, device=DEVICE).permute(2, 1, 0)[None]  # strided
    found = [out, *torch.autograd.grad(out, given, weight)]
    for ours, low, exact in zip(found, plain(given, weight, torch.float32), plain(given, weight), strict=True):
        assert (ours - exact).norm() <= 2 * ((low - exact).norm() + torch.finfo(torch.float32).eps * exact.norm())


def plain(given, weight, dtype=torch.float64):
    """Attention as its equation stands, and its gradients."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in given]
    out = (1.7 * leaves[0] @ leaves[1].mT).softmax(-1) @ leaves[2]
    return [out, *torch.autograd.grad(out, leaves, weight.to(dtype))]


@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.few(1)
def test_with_dropout_weights_are_whole_or_gone_and_gradients_are_of_the_same(cells, monkeypatch):
    monkeypatch.setattr(blockwise, "CELLS", cells)
    query, key, value = parts()
    identity = torch.eye(300, device=DEVICE).expand(1, 3, -1, -1).clone().requires_grad_()
    dropped = blockwise.attend(query, key, identity, 0.3, 0.25)
    wide = [t.detach().double().requires_grad_() for t in (query, key, value)]
    weights = (0.3 * wide[0] @ wide[1].mT).softmax(-1)
    ratio = dropped.detach() / weights.detach()
    kept = ratio > 0.5
    assert torch.all((ratio == 0) | ((ratio - 1 / 0.75).abs() < 1e-5))
    share = 1 - kept.double().mean()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert not torch.equal(kept[:, 0], kept[:, 1]), "heads share random numbers"
    assert not torch.equal(kept[:, :, 0], kept[:, :, 4]), "queries share random numbers"
    gradient = torch.randn_like(dropped)
    found = torch.autograd.grad(dropped, (query, key, identity), gradient)
    own = identity.detach().double().requires_grad_()
    truth = (weights * kept / 0.75) @ own
    for ours, exact in zip(found, torch.autograd.grad(truth, (*wide[:2], own), gradient.double()), strict=True):
        assert (ours - exact).norm() <= 3e-6 * exact.norm()


@pytest.mark.slow
def test_entries_are_dropped_one_by_one():
    """Eight columns share a random number."""
    query = torch.zeros(1, 1, 20, 2, device=DEVICE, requires_grad=True)
    key = torch.zeros(1, 1, 4096, 2, device=DEVICE)
    identity = torch.eye(4096, device=DEVICE)[None, None]
    gone = (blockwise.attend(query, key, identity, 1.0, 0.5) == 0).double()[0, 0]
    for shift in (1, 8, 256, 512, 2048):
        pair = torch.stack((gone[:, :-shift].flatten(), gone[:, shift:].flatten()))
        assert torch.corrcoef(pair)[0, 1].abs() < 0.025
    assert torch.corrcoef(gone).fill_diagonal_(0).abs().max() < 0.09


@pytest.mark.slow
def test_the_seed_of_torch_says_what_is_dropped():
    given, found = parts(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(blockwise.attend(*given, 0.3, 0.25))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_layers_between_rows_use_it(monkeypatch):
    """The same outputs and gradients as fused attention, where the choice is for blocks."""
    layer = kq.DatapointAttention(3, 8, heads=2, published=True).to(DEVICE)
    x = torch.randn(1, 20, 3, 8, device=DEVICE, requires_grad=True)
    found, attend, calls = [], blockwise.attend, []
    monkeypatch.setattr(blockwise, "attend", lambda *parts: calls.append(parts) or attend(*parts))
    for chosen in (True, False):
        for module in (kq.learn.layers.datapoints, cpu_dropout):
            monkeypatch.setattr(module, "large_in_float32", lambda query, key, chosen=chosen: chosen)
        monkeypatch.setattr(kq.learn.layers.datapoints, "SHORT", 0)
        out = layer(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    assert len(calls) == 1
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6
