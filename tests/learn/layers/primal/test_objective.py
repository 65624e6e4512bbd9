"""The loss and its theory: J by brute force, 0 at the KSVD but not only there; `loss="ksvd"` finds it, J² does not."""

import pytest
import torch

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
    slope = torch.autograd.grad(oracle.objective(layer, x[0]).sum(), layer.directions, create_graph=True)[0]
    residual = slope.square().sum((0, 2, 3)) / layer.directions.square().sum((0, 2, 3))
    assert [head["residual"] for head in layer.ksvd(x).heads] == pytest.approx(residual.sqrt().tolist())
    losses = layer(x, return_loss=True)[1], 0.1 * (error + 0.1 * residual).mean()
    assert torch.allclose(*losses)
    weights = [layer.directions, layer.log_lambda, layer.query_key.weight]
    assert all(map(torch.allclose, *(torch.autograd.grad(loss, weights) for loss in losses)))


SMALL, LARGE = (48, 2, 4, 64), (64, 2, 8, 128)  # dim, heads, rank, tokens: by chance 1/6 and 1/4 of a subspace is met


def trained(loss, size, data_dependent, steps=500):
    """A layer after so many steps of Adam on We, Wr and Λ with nothing but its loss, and its tokens, in float64."""
    dim, heads, rank, n = size
    torch.manual_seed(0)
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
@pytest.mark.parametrize(("size", "data_dependent"), [(SMALL, True), (LARGE, False)])
def test_only_the_ksvd_loss_finds_the_singular_subspace(size, data_dependent):
    """Every head of one; of the other J² vanishes where the overlap is about that of a layer never trained.

    A single head may begin near 0.6, by luck, and stay there.
    """
    assert oracle.overlap(*trained("ksvd", size, data_dependent)).min() >= 0.95
    layer, x = trained("paper", size, data_dependent)
    assert oracle.objective(layer, x).square().mean() < 1e-8
    found = oracle.overlap(layer, x)
    assert found.mean() < 0.6
    before = oracle.overlap(*trained("paper", size, data_dependent, steps=0))
    assert (found - before).abs().mean() < 0.15


# The reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_of_less_than_the_rank_has_no_subspace_to_compare_with(dtype):
    layer = oracle.make(bias=False).to(dtype)
    flat = torch.randn(1, 40, 2, dtype=dtype) @ torch.randn(2, 12, dtype=dtype)  # two directions in all heads
    for x in (flat, torch.randn(1, 2, 12, dtype=dtype), torch.zeros(1, 40, 12, dtype=dtype)):
        reading = layer.ksvd(x)
        assert all(head["left"] is None and head["right"] is None for head in reading.heads)
        assert kq.Reading.load(reading.to_json()) == reading
    assert all(0 < head["left"] <= 1 + 1e-9 for head in layer.ksvd(torch.randn(1, 3, 12, dtype=dtype)).heads)


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
