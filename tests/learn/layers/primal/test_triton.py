"""The Triton kernels against the reference: in the interpreter where there is no GPU, for real where there is one."""

import pytest
import torch

import keyquery as kq
from keyquery.learn.layers.primal import reference, sample
from keyquery.learn.layers.primal.dispatch import choose, fused

pytest.importorskip("triton")
kernels = pytest.importorskip("keyquery.learn.layers.primal.kernels.scores")
operators = pytest.importorskip("keyquery.learn.layers.primal.kernels.operators")
sample_kernels = pytest.importorskip("keyquery.learn.layers.primal.kernels.sample")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHORT = [torch.float32, torch.bfloat16, torch.float16]
# (batch, n, heads, p, s, v): tiles that are not full, widths that are no power of two, more programs than one a head
SHAPES = [(1, 40, 2, 20, 7, 12), (2, 33, 1, 16, 16, 32), (3, 1, 1, 5, 2, 5)]
WIDE = [(2, 1500, 8, 64, 30, 64), (1, 20_000, 4, 50, 40, 64), (65, 130, 8, 32, 20, 48)]
OTHER = ["elu", "given"]


def draw(shape, dtype, masked=False):
    """Queries and keys as views of one projection, and the rest in layouts that are not plain, as the layer may."""
    batch, n, heads, p, s, v = shape
    qk = torch.randn(batch, n, 2 * heads * p, device=DEVICE).to(dtype).unflatten(-1, (2, heads, p))
    weights = torch.randn(2, heads, batch, p, s + 3, device=DEVICE).to(dtype).transpose(1, 2)[..., :s]
    mix = torch.randn(2, v, s, device=DEVICE).mT
    real = torch.rand(batch, n, device=DEVICE) < 0.8 if masked else None
    grad = torch.randn(batch, n, heads, v, device=DEVICE).to(dtype)
    sums = torch.randn(2, batch, heads, s, device=DEVICE), torch.randn(2, batch, heads, p, p, device=DEVICE)
    return qk, weights, mix, real, (grad, *sums)


def plain(qk, weights, mix, real, feature, dtype):
    """The layer's heart in one dtype throughout, as a user of torch would write it."""
    phi, _ = reference.features(qk, real, feature, dtype)
    scores = phi @ weights
    out = scores[0] @ mix[0] + scores[1] @ mix[1]
    return out.transpose(1, 2), scores.square().sum(-2), phi.mT @ phi


def plain_all(given, feature, dtype):
    """Outputs and gradients of `plain`."""
    qk, weights, mix, real, grads = given
    leaves = [t.to(dtype).detach().requires_grad_() for t in (qk, weights, mix)]
    found = plain(*leaves, real, feature, dtype)
    gradients = torch.autograd.grad(found, leaves, [grad.to(dtype) for grad in grads])
    return [t.detach().double() for t in (*found, *gradients)]


def ours_all(given, feature):
    qk, weights, mix, real, grads = given
    found = operators.forward(qk, weights, mix, real, feature, True)
    gradients = operators.backward(qk, weights, mix, real, feature, *grads)
    return [t.double() for t in (*found, *gradients)]


def assert_within_budget(given, feature, dtype):
    """Errors are at most twice (those of plain torch in the same dtype + rounding)."""
    exact, short, ours = (
        plain_all(given, feature, torch.float64),
        plain_all(given, feature, dtype),
        ours_all(given, feature),
    )
    names = ("out", "energy", "grams", "qk", "weights", "mix")
    for name, truth, low, found in zip(names, exact, short, ours, strict=True):
        assert found.isfinite().all(), name
        budget = 2 * ((low - truth).norm() + truth.norm() * torch.finfo(dtype).eps)
        assert (found - truth).norm() <= budget, name


# In Triton's interpreter each takes seconds: every feature and dtype once, every shape once; the rest is slow.
KINDS = [*((dtype, "cosine") for dtype in SHORT), *((SHORT[0], feature) for feature in OTHER)]
CASES = [
    pytest.param(shape, feature, dtype, marks=[] if shape == SHAPES[0] or kind == 0 else [pytest.mark.slow])
    for shape in SHAPES
    for kind, (dtype, feature) in enumerate(KINDS)
]


@pytest.mark.parametrize(("shape", "feature", "dtype"), CASES, ids=str)
def test_kernels_are_the_reference(shape, feature, dtype):
    for masked in (False, True):
        assert_within_budget(draw(shape, dtype, masked), feature, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no GPU here")
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("shape", [*WIDE, (1, 2000, 4, 128, 96, 128)], ids=str)
@pytest.mark.parametrize("feature", ["cosine", *OTHER])
def test_kernels_are_the_reference_at_full_size(shape, feature, dtype):
    if shape[-1] == 128 and dtype == torch.float32:
        pytest.skip("too wide for float32, as `choose` says")
    for masked in (False, True):
        assert_within_budget(draw(shape, dtype, masked), feature, dtype)


def test_a_head_of_several_programs(monkeypatch):
    """As on a GPU, where the tokens of a head are shared out; its sums are put together again."""
    many = kernels.Launch(16, 4, 1, 4 if CUDA else 8)
    monkeypatch.setattr(kernels, "_launches", lambda qk, s, v: (many, many))
    given = draw((1, 150, 2, 16, 16, 16), torch.float32, masked=True)
    assert kernels._runs(given[0], many)[1] > 1
    assert_within_budget(given, "cosine", torch.float32)


@pytest.mark.parametrize("left_out", [{1}, {2}, {1, 2}], ids=str)
def test_losses_that_are_not_used_are_left_out(left_out):
    *given, grads = draw(SHAPES[0], torch.float32)
    grads = [None if i in left_out else grad for i, grad in enumerate(grads)]
    ours = operators.backward(*given, "cosine", *grads)
    theirs = reference.backward(*given, "cosine", *grads)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    assert operators.forward(*given, "cosine", False)[2] is None


@pytest.mark.parametrize("last", [2, 3])
def test_a_zero_query_and_gradients_in_any_layout(last):
    qk, weights, mix, _, (grad, *sums) = draw(SHAPES[0], torch.float32)
    qk = qk.clone()
    qk[0, 3] = 0
    grad = grad.transpose(1, last).contiguous().transpose(1, last)
    given = (qk, weights, mix, None, (grad, *sums))
    ours, theirs = ours_all(given, "cosine"), reference.backward(qk, weights, mix, None, "cosine", grad, *sums)
    assert all(torch.allclose(a, b.double(), atol=1e-3) for a, b in zip(ours[3:], theirs, strict=True))
    assert ours[3][0, 3].abs().max() == 0


@pytest.mark.parametrize(
    ("batch", "masked", "dtype"),
    [*((1, False, dtype) for dtype in SHORT), *((3, True, dtype) for dtype in SHORT), (11, False, torch.float32)],
)
@pytest.mark.few(2)
def test_projection_weights_by_kernels(batch, masked, dtype):
    """Against a sum over tokens in float64; samples with few tokens, none, and more of them than programs share."""
    heads, p, s = 2, 20, 7
    x = torch.randn(batch, 150, heads * p, device=DEVICE).to(dtype)
    real = torch.rand(batch, 150, device=DEVICE) < 0.5 if masked else None
    if masked:
        real[1, 3:] = False
        real[2] = False
    place, used = sample.evenly(150, 70, real, x.device)
    directions = torch.randn(2, heads, 80, s, device=DEVICE).to(dtype)[:, :, :70]
    grad, grad_x = torch.randn(2, batch, heads, p, s, device=DEVICE), torch.randn(x.shape, device=DEVICE).to(dtype)

    leaves = [t.double().requires_grad_() for t in (x, directions)]
    rows = torch.ones(batch, 70, dtype=torch.float64, device=DEVICE) if used is None else used.double()
    tokens = torch.stack([leaves[0][b, place if used is None else place[b]] for b in range(batch)])
    tokens = tokens.unflatten(-1, (heads, p)) * rows[..., None, None]
    truth = torch.einsum("bjhp,ahjs->abhps", tokens, leaves[1])
    expected = torch.autograd.grad(truth, leaves, grad.double())
    expected = truth, grad_x.double() + expected[0], expected[1]

    for module in (sample, sample_kernels):
        moved = grad_x.clone()
        weights = module.combine(x, place, directions, used)
        found = weights, moved, module.uncombine(x, place, directions, used, grad, moved)
        for ours, exact in zip(found[::2], expected[::2], strict=True):
            assert (ours.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()
        assert (moved.double() - expected[1]).norm() <= 4 * torch.finfo(dtype).eps * expected[1].norm()
        untouched = torch.ones(x.shape[:2], dtype=torch.bool, device=DEVICE).scatter(
            1, place.expand(batch, -1) if used is None else place, False
        )
        assert torch.equal(moved[untouched], grad_x[untouched])


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({}, False),
        ({}, True),
        ({"data_dependent": False}, False),
        ({"features": "elu"}, True),
        ({"features": "random"}, True),
    ],
)
def test_the_layer_by_either_implementation(options, masked):
    torch.manual_seed(3)
    layer = kq.PrimalAttention(24, 2, 4, device=DEVICE, **options)
    x = torch.randn(2, 45, 24, device=DEVICE, requires_grad=True)
    real = torch.rand(2, 45, device=DEVICE) < 0.8 if masked else None
    found = {}
    for impl in ("reference", "triton"):
        layer.impl = impl
        out = layer(x, mask=real)
        loss = out.sin().sum() + 10 * layer.regularizer()
        found[impl] = [out, loss, *torch.autograd.grad(loss, [x, *layer.parameters()])]
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        assert (ours - theirs).abs().max() <= 2e-4 * (1 + theirs.abs().max())


@pytest.mark.slow
@pytest.mark.unchecked
def test_kernels_compile_into_one_graph():
    layer = kq.PrimalAttention(24, 2, 4, impl="triton", device=DEVICE)
    x = torch.randn(2, 45, 24, device=DEVICE, requires_grad=True)

    def run(x):
        return layer(x), layer.regularizer()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = []
    for step in (run, compiled):
        out, loss = step(x)
        found.append([out, loss, *torch.autograd.grad(out.sum() + loss, [x, *layer.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_hooked_map_of_the_scores_is_called_after_the_kernels():
    layer, heard = kq.PrimalAttention(24, 2, 4, impl="triton", device=DEVICE), []
    x = torch.randn(2, 45, 24, device=DEVICE)
    found = [layer(x), layer.regularizer()]
    layer.concat.register_forward_hook(lambda module, args, out: heard.append(args[0].shape))
    called = [layer(x), layer.regularizer()]
    assert heard == [(2, 45, 2, 8)]  # [e; r] of every token and head
    for ours, theirs in zip(called, found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_no_tokens():
    out, energy, grams = fused(*draw((2, 0, 3, 16, 4, 16), torch.float32)[:3], impl="triton", gram=True)
    assert out.shape == (2, 0, 3, 16)
    assert energy.abs().max() == grams.abs().max() == 0


@pytest.mark.skipif(CUDA, reason="what happens without a GPU")
def test_which_implementation_runs(monkeypatch):
    qk = torch.zeros(1, 4, 2, 2, 8)
    assert choose("auto", qk, 8) == "reference"
    assert choose("triton", qk, 8) == "triton"
    for given, widest, complaint in ((qk.double(), 8, "x is torch.float64"), (qk, 200, "in torch.float32, not 200")):
        with pytest.raises(RuntimeError, match=complaint):
            choose("triton", given, widest)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match=r'impl="triton" needs a CUDA GPU, or TRITON_INTERPRET=1.*tensor on cpu'):
        kq.PrimalAttention(8, 2, 2, impl="triton")(torch.zeros(1, 4, 8))


def test_there_is_no_causal_kernel():
    with pytest.raises(RuntimeError, match='impl="triton" does not support causal attention'):
        kq.PrimalAttention(8, 2, 2, impl="triton")(torch.zeros(1, 4, 8), is_causal=True)
