"""The loss and its theory: J by brute force, 0 at the KSVD but not only there; `loss="ksvd"` finds it, J² does not."""

import pytest
import torch
from torch import nn

import keyquery as kq
from tests.learn.layers.primal import oracle

EXACT = {"dtype": torch.float64}


def at_the_ksvd(layer, x):
    """Weights of kq.ksvd on the brute-force features, any scale of a triple."""
    _, query, key = oracle.kernel(layer, x)
    with torch.no_grad():
        layer.directions.zero_()
        for head in range(layer.heads):
            solution = kq.ksvd(query[head], key[head], rank=3)
            scale = torch.tensor([1.0, -0.3, 2.0], **EXACT)
            for side, weights in zip(layer.directions, solution.primal(), strict=True):
                side[head, : len(weights)] = weights * scale
            layer.log_lambda[head] = (len(x) / solution.values).log()
    return layer


def test_opposite_heads_do_not_cancel():
    layer, x = oracle.make(), torch.randn(1, 40, 12, **EXACT)
    with torch.no_grad():
        layer.log_lambda.fill_(-30.0)  # J is the trace alone
        layer.directions[0, 1], layer.directions[1, 1] = layer.directions[0, 0], -layer.directions[1, 0]
    values = oracle.objective(layer, x[0])
    assert abs(values.sum().item()) < 1e-9
    assert layer(x, return_loss=True)[1].item() > 0.1 * values[0].square().item() * 0.99


@pytest.mark.parametrize("features", ["cosine", "elu"])
@pytest.mark.parametrize("data_dependent", [True, False])
def test_exact_ksvd_weights_are_stationary(features, data_dependent):
    x = torch.randn(40, 12, **EXACT)
    layer = at_the_ksvd(oracle.make(features=features, data_dependent=data_dependent), x)
    size = layer.directions.square().sum().item()
    truth = torch.linalg.svdvals(oracle.kernel(layer, x)[0])
    for number, head in enumerate(layer.ksvd(x[None]).heads):
        assert abs(head["objective"]) < 1e-11 * size
        assert head["residual"] < 1e-7
        assert min(head["left"], head["right"]) > 1 - 1e-9
        assert torch.allclose(torch.tensor(head["spectrum"], **EXACT), truth[number, :6] / 40, atol=1e-9)
    gradient = torch.autograd.grad(layer(x[None], return_loss=True)[1], layer.directions)[0]
    assert gradient.abs().max() < 1e-6 * size


@pytest.mark.parametrize("data_dependent", [True, False])
def test_the_reconstruction_error_is_that_of_the_kernel(data_dependent):
    layer, x = oracle.make(data_dependent=data_dependent, loss="ksvd"), torch.randn(1, 40, 12, **EXACT)
    kernel = oracle.kernel(layer, x[0])[0]
    e, r, _ = oracle.scores(layer, x[0])
    rebuilt = e * layer.log_lambda.exp()[:, None] @ r.mT
    error = (kernel - rebuilt).square().sum((1, 2)) / kernel.square().sum((1, 2))
    residual = torch.tensor([head["residual"] for head in layer.ksvd(x).heads], **EXACT)
    assert torch.allclose(layer(x, return_loss=True)[1], 0.1 * (error + 0.1 * residual.square()).mean())


def test_the_residual_is_the_gradient_of_J():
    layer, x = oracle.make(), torch.randn(1, 40, 12, **EXACT)
    gradient = torch.autograd.grad(oracle.objective(layer, x[0]).sum(), layer.directions)[0]
    expected = (gradient.square().sum((0, 2, 3)) / layer.directions.square().sum((0, 2, 3))).sqrt()
    residual = torch.tensor([head["residual"] for head in layer.ksvd(x).heads], **EXACT)
    assert torch.allclose(residual, expected.detach())


SMALL, LARGE = (48, 2, 4, 64), (64, 2, 8, 128)  # dim, heads, rank, tokens: by chance 1/6 and 1/4 of a subspace is met


def trained(loss, size, seed, data_dependent, steps=500):
    """A layer after so many steps of Adam on We, Wr and Λ with nothing but its loss, and its tokens, in float64."""
    dim, heads, rank, n = size
    torch.manual_seed(seed)
    x = torch.randn(1, n, dim)
    layer = kq.PrimalAttention(dim, heads, rank, loss=loss, eta=1.0, data_dependent=data_dependent)
    optimiser = torch.optim.Adam([layer.directions, layer.log_lambda], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for _ in range(steps):
        optimiser.zero_grad()
        layer(x, return_loss=True)[1].backward()
        optimiser.step()
        schedule.step()
    return layer.double(), x[0].double()


@pytest.mark.slow
@pytest.mark.unchecked  # for speed
@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_only_the_ksvd_loss_finds_the_singular_subspace(size, seed, data_dependent):
    """Every head of one; of the other J² vanishes where the overlap is about that of a layer never trained.

    A single head may begin near 0.6, by luck, and stay there.
    """
    assert oracle.overlap(*trained("ksvd", size, seed, data_dependent)).min() >= 0.95
    layer, x = trained("paper", size, seed, data_dependent)
    assert oracle.objective(layer, x).square().mean() < 1e-8
    found = oracle.overlap(layer, x)
    assert found.mean() < 0.6
    before = oracle.overlap(*trained("paper", size, seed, data_dependent, steps=0))
    assert (found - before).abs().mean() < 0.15


# The reading


def test_the_overlap_of_a_random_subspace_is_rank_over_features():
    """What the docs call chance, by the library's own reading: isotropic features, directions drawn anew."""
    layer, left = oracle.make(96, 4, 6, data_dependent=False, bias=False), []
    layer.query_key.weight.data = torch.eye(96, **EXACT).repeat(2, 1)
    for _ in range(10):
        nn.init.normal_(layer.directions)
        left += [head["left"] for head in layer.ksvd(torch.randn(1, 2000, 96, **EXACT)).heads]
    assert sum(left) / len(left) == pytest.approx(6 / 24, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_of_less_than_the_rank_has_no_subspace_to_compare_with(dtype):
    layer = oracle.make(bias=False).to(dtype)
    flat = torch.randn(1, 40, 2, dtype=dtype) @ torch.randn(2, 12, dtype=dtype)  # two directions in all heads
    for x in (flat, torch.randn(1, 2, 12, dtype=dtype), torch.zeros(1, 40, 12, dtype=dtype)):
        reading = layer.ksvd(x)
        assert all(head["left"] is None and head["right"] is None for head in reading.heads)
        assert kq.Reading.load(reading.to_json()) == reading
    assert all(0 < head["left"] <= 1 + 1e-9 for head in layer.ksvd(torch.randn(1, 3, 12, dtype=dtype)).heads)


def test_directions_that_are_the_same_count_once():
    layer, x = oracle.make(), torch.randn(1, 40, 12, **EXACT)
    with torch.no_grad():
        layer.directions[..., 2] = -2 * layer.directions[..., 1]
    e, r, _ = oracle.scores(layer, x[0])
    left, _, right = torch.linalg.svd(oracle.kernel(layer, x[0])[0])
    for number, head in enumerate(layer.ksvd(x).heads):
        for side, scores, basis in (("left", e, left), ("right", r, right.mT)):
            spanned = torch.linalg.qr(scores[number, :, :2])[0]
            expected = (basis[number, :, :3].mT @ spanned).square().sum() / 3
            assert head[side] == pytest.approx(expected.item(), abs=1e-6)


def test_the_reading_is_plain_data():
    layer, x = oracle.make(), torch.randn(3, 9, 12, **EXACT)
    real = torch.tensor([[True] * 9, [False] * 9, [True] * 4 + [False] * 5])
    reading = layer.ksvd(x, mask=real)
    assert kq.Reading.load(reading.to_json()) == reading
    rows = [(row["sample"], row["head"], row["tokens"]) for row in reading.records()]
    assert rows == [(0, 0, 9), (0, 1, 9), (2, 0, 4), (2, 1, 4)]
    assert reading.heads[2:] == [
        {
            **head,
            "sample": 2,
            "spectrum": pytest.approx(head["spectrum"]),
            "objective": pytest.approx(head["objective"]),
        }
        | {name: pytest.approx(head[name]) for name in ("residual", "left", "right")}
        for head in layer.ksvd(x[2:, :4]).heads
    ]
