"""A primal layer as one autograd function, against brute force in float64; in Triton's interpreter without a GPU."""

import copy

import pytest
import torch

import keyquery as kq
from tests.learn.layers.primal import oracle

pytest.importorskip("triton")
whole = pytest.importorskip("keyquery.learn.layers.primal.kernels.whole")
kernels = pytest.importorskip("keyquery.learn.layers.primal.kernels.scores")
finish = pytest.importorskip("keyquery.learn.layers.primal.kernels.finish")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (batch, n, options): more tokens than rows of directions, fewer, and more samples than programs share them
CASES = [(1, 45, {}), (1, 20, {"bias": False, "features": "elu"}), (3, 4, {"eta": 0.7})]


def make(**options):
    torch.manual_seed(1)
    layer = kq.PrimalAttention(24, 2, 4, impl="triton", device=DEVICE, **options)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return layer


def gradients(out, loss, leaves, weight):
    found = torch.autograd.grad((out, loss), leaves, (weight.to(out.dtype), torch.full_like(loss, 3.0)))
    return [t.detach().double() for t in (out, loss, *found)]


def brute_force(layer, x, weight):
    """Output, loss and all gradients by every pair of tokens, in float64."""
    layer, x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    out = torch.stack([oracle.forward(layer, sequence) for sequence in x])
    loss = layer.eta * torch.stack([oracle.objective(layer, sequence) for sequence in x]).square().mean()
    return gradients(out, loss, [x, *layer.parameters()], weight.double())


def ours(layer, x, weight, autocast=False):
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        out, loss = layer(x), layer.regularizer()
    assert type(out.grad_fn).__name__ == "_WholeBackward"
    return gradients(out, loss, [x, *layer.parameters()], weight)


@pytest.mark.parametrize(("batch", "n", "options"), CASES, ids=str)
@pytest.mark.few(1)
def test_it_is_brute_force(batch, n, options, monkeypatch):
    monkeypatch.setattr(finish, "SHARES", 2)
    layer = make(**options)
    x, weight = torch.randn(2, batch, n, 24, device=DEVICE)
    for found, truth in zip(ours(layer, x, weight), brute_force(layer, x, weight), strict=True):
        assert (found - truth).norm() <= 3e-6 * truth.norm()


def test_in_half_precision_it_is_no_worse_than_the_reference():
    """Errors are at most twice (those of the reference in the same dtype + rounding)."""
    layer = make()
    x, weight = torch.randn(2, 1, 45, 24, device=DEVICE)
    truth, found = brute_force(layer, x, weight), ours(layer, x, weight, autocast=True)
    layer.impl, x = "reference", x.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        out, loss = layer(x), layer.regularizer()
    reference = gradients(out, loss, [x, *layer.parameters()], weight)
    for exact, low, high in zip(truth, reference, found, strict=True):
        assert (high - exact).norm() <= 2 * ((low - exact).norm() + torch.finfo(torch.bfloat16).eps * exact.norm())


def test_a_head_of_several_programs(monkeypatch):
    """Partial sums of several programs are added up."""
    many = kernels.Launch(16, 4, 1, 4 if DEVICE == "cuda" else 8)
    monkeypatch.setattr(kernels, "_launches", lambda qk, s, v: (many, many))
    layer = make()
    x, weight = torch.randn(2, 1, 50, 24, device=DEVICE)
    for found, truth in zip(ours(layer, x, weight), brute_force(layer, x, weight), strict=True):
        assert (found - truth).norm() <= 3e-6 * truth.norm()


def test_outputs_that_are_not_used_are_left_out():
    layer, x = make(), torch.randn(1, 45, 24, device=DEVICE)
    out = layer(x)
    layer.regularizer()
    out.sum().backward()  # its gradient is one number, expanded
    assert layer.log_lambda.grad is None
    assert torch.equal(layer.output.bias.grad, torch.full((24,), 45.0, device=DEVICE))
    truth = torch.autograd.grad(oracle.forward(layer, x[0]).sum(), layer.directions)[0]
    assert torch.allclose(layer.directions.grad, truth, rtol=1e-4, atol=1e-5)
    layer.zero_grad()
    layer(x)
    layer.regularizer().backward()
    truth = torch.autograd.grad(layer.eta * oracle.objective(layer, x[0]).square().mean(), layer.directions)[0]
    assert torch.allclose(layer.directions.grad, truth, rtol=1e-4, atol=1e-6)
    assert layer.output.weight.grad.abs().max() == 0


def test_eta_may_change_after_the_forward_pass():
    layer, x = make(eta=0.0), torch.randn(1, 45, 24, device=DEVICE)
    layer(x)
    assert layer.regularizer().item() == 0
    layer.eta = 0.3
    truth = 0.3 * oracle.objective(layer, x[0]).square().mean()
    assert torch.allclose(layer.regularizer(), truth, rtol=1e-5)


def test_the_spectrum_is_that_of_the_reference():
    layer, x = make(), torch.randn(1, 45, 24, device=DEVICE)
    found = []
    for impl in ("triton", "reference"):
        layer.impl = impl
        layer(x)
        found.append(layer.ksvd().heads)
    for ours_, theirs in zip(*found, strict=True):
        assert ours_["residual"] == pytest.approx(theirs["residual"], rel=1e-4)
        assert ours_["spectrum"] == pytest.approx(theirs["spectrum"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_operators_have_the_shapes_they_promise():
    """What the compiler is told of the operators is what they return."""
    layer, x = make(), torch.randn(1, 12, 24, device=DEVICE)
    own = [weight.detach() for weight in (layer.directions, layer.log_lambda)]
    own += [t.detach() for part in (layer.query_key, layer.concat, layer.output) for t in (part.weight, part.bias)]
    first = (x, *own, "cosine", 0.1, torch.float32)
    _, _, energy, weights, *_, qk, joined, pull, bend = whole._run_forward(*first)
    gain = torch.ones((), device=DEVICE)
    small = (energy, pull, bend, *own[:2], own[2], own[6])
    second = (torch.randn_like(x), gain, x, qk, weights, own[4], joined, *small, "cosine", torch.float32, True)
    third = (None, gain, *second[2:-1], False)
    cases = [(whole._FORWARD, first), (whole._FORWARD, (*first[:-1], torch.bfloat16))]
    cases += [(whole._BACKWARD, (*second, [True] * 3)), (whole._BACKWARD, (*third, [False, True, False]))]
    for operator, given in cases:
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
