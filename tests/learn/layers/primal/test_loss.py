"""The loss and its theory: J by brute force, 0 at the KSVD but not only there; `loss="ksvd"` finds it, J² does not."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.learn.layers.primal.objective import objective, reconstruction
from tests.learn.layers.primal import oracle

EXACT = {"dtype": torch.float64}


@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("n", [5, 40])
def test_the_regularizer_is_squared_before_it_is_averaged(data_dependent, n):
    layer, x = oracle.make(data_dependent=data_dependent, eta=0.7), torch.randn(3, n, 12, **EXACT)
    layer(x)
    each = torch.stack([oracle.objective(layer, sequence) for sequence in x])
    assert torch.allclose(layer.regularizer(), 0.7 * each.square().mean(), rtol=1e-12)


def test_opposite_heads_do_not_cancel():
    layer, x = oracle.make(), torch.randn(1, 40, 12, **EXACT)
    with torch.no_grad():
        layer.log_lambda.fill_(-30.0)  # J is the trace alone
        layer.directions[0, 1], layer.directions[1, 1] = layer.directions[0, 0], -layer.directions[1, 0]
    layer(x)
    each = oracle.objective(layer, x[0])
    assert abs(each.sum().item()) < 1e-9
    assert layer.regularizer().item() > 0.1 * each[0].square().item() * 0.99


def test_kq_regularizer_sums_over_a_model():
    model = nn.Sequential(kq.PrimalAttention(12, 2, 3), nn.Linear(12, 12), kq.PrimalAttention(12, 2, 3, eta=0.3))
    model(torch.randn(2, 20, 12))
    assert torch.allclose(kq.regularizer(model), model[0].regularizer() + model[2].regularizer())
    assert kq.regularizer(nn.Linear(2, 2)).item() == 0


@pytest.mark.parametrize("features", ["cosine", "elu", "random"])
@pytest.mark.parametrize("data_dependent", [True, False])
def test_exact_ksvd_weights_are_stationary(features, data_dependent):
    """They come from kq.ksvd on the brute-force features, not from the layer's own solver."""
    layer, x = oracle.make(features=features, data_dependent=data_dependent), torch.randn(40, 12, **EXACT)
    n = len(x)
    _, query, key = oracle.kernel(layer, x)
    with torch.no_grad():
        for head in range(2):
            solution = kq.ksvd(query[head], key[head], rank=3)
            we, wr = solution.primal()
            scale = torch.tensor([1.0, -0.3, 2.0], **EXACT)  # any scale of a triple will do
            layer.directions[0, head, : len(we)] = we * scale
            layer.directions[1, head, : len(wr)] = wr * scale
            layer.log_lambda[head] = (n / solution.values).log()
    layer(x[None])
    for head in layer.ksvd().heads:
        size = layer.directions.square().sum().item()
        assert abs(head["objective"]) < 1e-11 * size
        assert head["residual"] < 1e-7
        assert head["left"] > 1 - 1e-9
        assert head["right"] > 1 - 1e-9
    gradient = torch.autograd.grad(layer.regularizer(), layer.directions)[0]
    assert gradient.abs().max() < 1e-6 * size


@pytest.mark.parametrize("data_dependent", [True, False])
def test_started_at_the_ksvd(data_dependent):
    x = torch.randn(1, 40, 12, **EXACT)
    layer = kq.PrimalAttention(12, 2, 3, init="ksvd", data=x, data_dependent=data_dependent, loss="ksvd", **EXACT)
    layer(x)
    kernel = oracle.kernel(layer, x[0])[0]
    truth = torch.linalg.svdvals(kernel)
    e, r, _ = oracle.scores(layer, x[0])
    rebuilt = e * layer.log_lambda.exp()[:, None] @ r.mT
    best = truth[:, 3:].square().sum(-1)
    assert torch.allclose((kernel - rebuilt).square().sum((1, 2)), best)
    for number, head in enumerate(layer.ksvd().heads):
        assert head["residual"] < 1e-8
        assert head["left"] > 1 - 1e-9
        assert torch.allclose(torch.tensor(head["spectrum"], **EXACT), truth[number, :6] / 40, atol=1e-9)
    lost = (best / truth.square().sum(-1)).mean()
    assert torch.allclose(layer.regularizer(), layer.eta * lost)


def test_started_at_the_ksvd_of_several_samples_with_padding():
    """The mean of J over samples is stationary."""
    layer, x = oracle.make(), torch.randn(3, 45, 12, **EXACT)
    real = torch.ones(3, 45, dtype=torch.bool)
    real[1, 35:] = False
    layer.start(x, real)
    layer(x, mask=real)
    mean = objective(layer._last.batches[0], layer.directions, layer.log_lambda).mean(0).sum()
    assert torch.autograd.grad(mean, layer.directions)[0].abs().max() < 1e-9 * layer.directions.abs().max()


@pytest.mark.parametrize("data_dependent", [True, False])
def test_the_reconstruction_error_is_that_of_the_kernel(data_dependent):
    layer, x = oracle.make(data_dependent=data_dependent, loss="ksvd"), torch.randn(1, 40, 12, **EXACT)
    layer(x)
    kernel = oracle.kernel(layer, x[0])[0]
    e, r, _ = oracle.scores(layer, x[0])
    rebuilt = e * layer.log_lambda.exp()[:, None] @ r.mT
    error = (kernel - rebuilt).square().sum((1, 2)) / kernel.square().sum((1, 2))
    residual = torch.tensor([head["residual"] for head in layer.ksvd().heads], **EXACT)
    found = reconstruction(layer._last.batches[0], layer.directions, layer.log_lambda)
    assert torch.allclose(found[0], error + 0.1 * residual.square())
    assert torch.allclose(layer.regularizer(), 0.1 * found.mean())


def test_the_residual_is_the_gradient_of_J():
    layer, x = oracle.make(), torch.randn(1, 40, 12, **EXACT)
    layer(x)
    gradient = torch.autograd.grad(oracle.objective(layer, x[0]).sum(), layer.directions)[0]
    expected = (gradient.square().sum((0, 2, 3)) / layer.directions.square().sum((0, 2, 3))).sqrt()
    residual = torch.tensor([head["residual"] for head in layer.ksvd().heads], **EXACT)
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
        layer(x)
        optimiser.zero_grad()
        layer.regularizer().backward()
        optimiser.step()
        schedule.step()
    return layer.double(), x[0].double()


def assert_only_the_ksvd_loss_finds_the_singular_subspace(size, seed, data_dependent):
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


@pytest.mark.unchecked  # for speed
@pytest.mark.parametrize("data_dependent", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.slow
def test_only_the_ksvd_loss_finds_the_singular_subspace(data_dependent):
    assert_only_the_ksvd_loss_finds_the_singular_subspace(SMALL, 0, data_dependent)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_so_it_is_with_other_seeds_and_sizes(size, seed, data_dependent):
    assert_only_the_ksvd_loss_finds_the_singular_subspace(size, seed, data_dependent)


def test_the_overlap_of_a_random_subspace_is_rank_over_features():
    """What the docs call chance, by the library's own reading: isotropic features, directions drawn anew."""
    layer, left = oracle.make(96, 4, 6, data_dependent=False, bias=False), []
    layer.query_key.weight.data = torch.eye(96, **EXACT).repeat(2, 1)
    for _ in range(10):
        nn.init.normal_(layer.directions)
        with torch.no_grad():
            layer(torch.randn(1, 4000, 96, **EXACT))
        left += [head["left"] for head in layer.ksvd().heads]
    assert sum(left) / len(left) == pytest.approx(6 / 24, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_of_less_than_the_rank_has_no_subspace_to_compare_with(dtype):
    layer = oracle.make(bias=False).to(dtype)
    flat = torch.randn(1, 40, 2, dtype=dtype) @ torch.randn(2, 12, dtype=dtype)  # two directions in all heads
    for x in (flat, torch.randn(1, 2, 12, dtype=dtype), torch.zeros(1, 40, 12, dtype=dtype)):
        layer(x)
        reading = layer.ksvd()
        assert all(head["left"] is None and head["right"] is None for head in reading.heads)
        assert kq.Reading.load(reading.to_json()) == reading
        assert reading._repr_html_()
    layer(torch.randn(1, 3, 12, dtype=dtype))
    assert all(0 < head["left"] <= 1 + 1e-9 for head in layer.ksvd().heads)


def test_directions_that_are_the_same_count_once():
    layer, x = oracle.make(), torch.randn(1, 40, 12, **EXACT)
    with torch.no_grad():
        layer.directions[..., 2] = -2 * layer.directions[..., 1]
    layer(x)
    e, r, _ = oracle.scores(layer, x[0])
    left, _, right = torch.linalg.svd(oracle.kernel(layer, x[0])[0])
    for number, head in enumerate(layer.ksvd().heads):
        for side, scores, basis in (("left", e, left), ("right", r, right.mT)):
            spanned = torch.linalg.qr(scores[number, :, :2])[0]
            expected = (basis[number, :, :3].mT @ spanned).square().sum() / 3
            assert head[side] == pytest.approx(expected.item(), abs=1e-6)


def test_the_reading_is_plain_data():
    layer = oracle.make()
    real = torch.tensor([[True] * 9, [False] * 9, [True] * 4 + [False] * 5])
    layer(torch.randn(3, 9, 12, **EXACT), mask=real)
    reading = layer.ksvd()
    assert kq.Reading.load(reading.to_json()) == reading
    assert [(row["sample"], row["head"], row["tokens"]) for row in reading.records()] == [
        (0, 0, 9),
        (0, 1, 9),
        (2, 0, 4),
        (2, 1, 4),
    ]
    assert reading._repr_html_()


def test_packed_samples_keep_their_numbers():
    layer = oracle.make()
    offsets = torch.tensor([0, 3, 3, 53, 60, 61])
    layer(torch.randn(61, 12, **EXACT), offsets=offsets)
    assert [(row["sample"], row["tokens"]) for row in layer.ksvd().records() if row["head"] == 0] == [
        (0, 3),
        (2, 50),
        (3, 7),
        (4, 1),
    ]


def test_weights_that_changed_since_the_forward_are_noticed():
    layer, x = oracle.make(), torch.randn(1, 9, 12, **EXACT)
    layer(x)
    with torch.no_grad():
        layer.directions.mul_(3)
    for asked in (layer.regularizer, layer.ksvd):
        with pytest.raises(RuntimeError, match="weights have changed since: call the layer again"):
            asked()
    layer(x)
    assert layer.regularizer().isfinite()


def test_nothing_at_all_costs_nothing():
    layer = oracle.make()
    layer(torch.randn(0, 5, 12, **EXACT))
    assert layer.regularizer() == 0
    layer(torch.randn(0, 12, **EXACT), offsets=torch.tensor([0, 0]))
    assert layer.regularizer() == 0
    with pytest.raises(RuntimeError, match="1 was not called"):
        kq.regularizer(torch.nn.Sequential(layer, oracle.make()))


def test_large_numbers_have_gradients_in_the_causal_form():
    layer, x = kq.PrimalAttention(12, 2, 3, features="elu"), (300 * torch.randn(1, 20, 12)).requires_grad_()
    layer(x, is_causal=True).sum().backward()
    assert x.grad.isfinite().all()
