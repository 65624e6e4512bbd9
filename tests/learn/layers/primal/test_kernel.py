"""The Triton kernel against the reference: in the interpreter where there is no GPU, for real where there is one."""

from itertools import product

import pytest
import torch

import keyquery as kq
from keyquery.learn.layers.primal import reference

pytest.importorskip("triton")
kernel = pytest.importorskip("keyquery.learn.layers.primal.kernel")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHORT = [torch.float32, torch.bfloat16, torch.float16]
# (batch, n, heads, p, s, v): tiles that are not full, widths that are no power of two, more programs than one a head
SHAPES = [(1, 40, 2, 20, 7, 12), (2, 33, 1, 16, 16, 32), (3, 1, 1, 5, 2, 5), (2, 0, 3, 16, 4, 16)]
WIDE = [(2, 1500, 8, 64, 30, 64), (1, 20_000, 4, 50, 40, 64), (65, 130, 8, 32, 20, 48), (1, 2000, 4, 128, 96, 128)]


def draw(shape, dtype, masked=False):
    """Queries and keys as views of one projection, and the rest in layouts that are not plain, as the layer may."""
    batch, n, heads, p, s, v = shape
    qk = torch.randn(batch, n, 2 * heads * p, device=DEVICE).to(dtype).unflatten(-1, (2, heads, p))
    if n > 3 and dtype != torch.float16:  # in which plain torch cannot tell tiny from 0
        qk[0, 3] = 0  # has no direction
    weights = torch.randn(2, heads, batch, p, s + 3, device=DEVICE).to(dtype).transpose(1, 2)[..., :s]
    mix = torch.randn(2, v, s, device=DEVICE).mT
    real = torch.rand(batch, n, device=DEVICE) < 0.8 if masked else None
    grad = torch.randn(batch, n, heads, v, device=DEVICE).to(dtype)
    return qk, weights, mix, real, [grad, torch.randn(2, batch, heads, s, device=DEVICE)]


def plain(qk, weights, mix, real):
    """The layer's heart in one dtype throughout, as a user of torch would write it."""
    phi = reference.features(qk, real, "cosine", qk.dtype)
    scores = phi @ weights
    out = scores[0] @ mix[0] + scores[1] @ mix[1]
    return out.transpose(1, 2), scores.square().sum(-2)


def results(run, given, dtype=None):
    """Outputs and gradients."""
    *tensors, real, grads = given
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in tensors]
    outputs = run(*leaves, real)
    used = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    chosen, weights = zip(*used, strict=True)
    gradients = torch.autograd.grad(chosen, leaves, weights, materialize_grads=True)
    return [t.detach().double() for t in (*outputs, *gradients)]


def assert_within_budget(given, dtype):
    """Errors are at most twice (those of plain torch in the same dtype + rounding)."""
    exact, short, ours = (
        results(plain, given, torch.float64),
        results(plain, given, dtype),
        results(kernel.attend, given),
    )
    for name, truth, low, found in zip(("out", "energy", "qk", "weights", "mix"), exact, short, ours, strict=True):
        assert found.isfinite().all(), name
        budget = 2 * ((low - truth).norm() + truth.norm() * torch.finfo(dtype).eps)
        assert (found - truth).norm() <= budget, name


# In Triton's interpreter each takes seconds: every dtype once, every shape once; the rest is slow.
GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no GPU here")]
CASES = [
    pytest.param(shape, dtype, marks=[] if shape == SHAPES[0] or dtype == SHORT[0] else [pytest.mark.slow])
    for shape, dtype in product(SHAPES, SHORT)
]
CASES += [
    pytest.param(shape, dtype, marks=GPU)
    for shape, dtype in product(WIDE, SHORT)
    if shape[-1] < 128 or dtype != torch.float32  # too wide for float32, as the layer says
]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_the_kernel_is_the_reference(shape, dtype):
    for masked in (False, True):
        assert_within_budget(draw(shape, dtype, masked), dtype)


def test_a_head_of_several_programs(monkeypatch):
    """As on a GPU, where the tokens of a head are shared out; its sums are put together again."""
    many = kernel.Launch(16, 4, 1, 4 if CUDA else 8)
    monkeypatch.setattr(kernel, "_launches", lambda qk, s, v: (many, many))
    given = draw((1, 150, 2, 16, 16, 16), torch.float32, masked=True)
    assert kernel._runs(given[0], many)[1] > 1
    assert_within_budget(given, torch.float32)


@pytest.mark.parametrize("unused", [0, 1])
def test_outputs_that_are_not_used_and_gradients_in_any_layout(unused):
    *given, grads = draw(SHAPES[0], torch.float32)
    grads[0] = grads[0].transpose(1, 3).contiguous().transpose(1, 3)
    grads[unused] = None
    ours, theirs = (results(run, (*given, grads)) for run in (kernel.attend, plain))
    assert all(torch.allclose(*pair, atol=1e-3) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_the_layer_by_either_implementation(masked):
    torch.manual_seed(3)
    layer, found = kq.PrimalAttention(24, 2, 4, device=DEVICE), {}
    x = torch.randn(2, 45, 24, device=DEVICE, requires_grad=True)
    real = torch.rand(2, 45, device=DEVICE) < 0.8 if masked else None
    for impl in ("reference", "triton"):
        layer.impl = impl
        out, loss = layer(x, mask=real, return_loss=True)
        found[impl] = [out, loss, *torch.autograd.grad(out.sin().sum() + 10 * loss, [x, *layer.parameters()])]
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        assert (ours - theirs).abs().max() <= 2e-4 * (1 + theirs.abs().max())
    calls = []
    layer.concat.register_forward_hook(lambda module, args, out: calls.append(args[0].shape))
    assert torch.allclose(layer(x, mask=real), found["reference"][0], atol=1e-4, rtol=1e-4)
    assert calls == [(2, 45, 2, 8)]  # [e; r] of every token and head


@pytest.mark.slow
@pytest.mark.unchecked
def test_the_kernel_compiles_into_one_graph():
    layer = kq.PrimalAttention(24, 2, 4, impl="triton", device=DEVICE)
    x = torch.randn(2, 45, 24, device=DEVICE, requires_grad=True)

    def run(x):
        return layer(x), layer.regularizer()

    found = []
    for step in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out, loss = step(x)
        found.append([out, loss, *torch.autograd.grad(out.sum() + loss, [x, *layer.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(CUDA, reason="what happens without a GPU")
@pytest.mark.parametrize(
    ("sizes", "options", "dtype", "complaint"),
    [
        ((8, 2, 2), {}, torch.float64, "heads of up to 0 features in torch.float64"),
        ((200, 1, 2), {}, torch.float32, "in torch.float32, not 200"),
        ((8, 2, 2), {"features": "elu"}, torch.float32, "not 'elu' and 'paper'"),
        ((8, 2, 2), {"loss": "ksvd"}, torch.float32, "not 'cosine' and 'ksvd'"),
        ((8, 2, 2), None, torch.float32, "needs a CUDA GPU, or TRITON_INTERPRET=1.*tensor on cpu"),
    ],
)
def test_which_implementation_runs(sizes, options, dtype, complaint, monkeypatch):
    if options is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    layer, x = kq.PrimalAttention(*sizes, impl="triton", **(options or {})).to(dtype), torch.zeros(1, 4, sizes[0])
    with pytest.raises(RuntimeError, match=f'impl="triton".*{complaint}.*the reference there'):
        layer(x.to(dtype))
    layer.impl = "auto"
    assert layer(x.to(dtype)).isfinite().all()
