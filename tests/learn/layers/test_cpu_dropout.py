"""Dropout on a processor: what it drops, what it leaves, and what attention with it keeps for backward."""

import pytest
import torch

import keyquery as kq
from keyquery.learn.layers import cpu_dropout as dropping
from keyquery.learn.layers.cpu_dropout import Dropout, drop_and_attend


def parts(n=13, m=11):
    torch.manual_seed(0)
    shapes = ((1, 2, n, 5), (1, 2, m, 5), (1, 2, m, 4))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture(params=["whole", "blocks"])
def by(request, monkeypatch):
    """At one go, and by blocks of three queries, the last of them smaller."""
    if request.param == "blocks":
        monkeypatch.setattr(dropping, "FEW", 1)
        monkeypatch.setattr(dropping, "CELLS", 35)
    return request.param


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("count", [100, 10**6])
def test_what_is_dropped_is_a_share_and_the_rest_makes_up_for_it(count, share):
    torch.manual_seed(0)
    x = torch.full((count,), 3.0, requires_grad=True)
    found = Dropout(share)(x)
    gone = found == 0
    assert gone.double().mean().item() == pytest.approx(share, abs=5 * (share / count) ** 0.5)
    assert torch.allclose(found[~gone], torch.tensor(3 / (1 - share)))
    (found * 2).sum().backward()
    assert torch.equal(x.grad == 0, gone)
    assert torch.allclose(x.grad[~gone], torch.tensor(2 / (1 - share)))


def test_entries_are_dropped_one_by_one():
    torch.manual_seed(0)
    gone = (Dropout(0.5)(torch.ones(4, 2**18)) == 0).double()
    apart = gone.flatten()
    for shift in (1, 2, 3, 4, 8):  # four are drawn out of one number
        assert torch.corrcoef(torch.stack((apart[:-shift], apart[shift:])))[0, 1].abs() < 0.005
    assert torch.corrcoef(gone).fill_diagonal_(0).abs().max() < 0.01


def test_nothing_is_dropped_where_nothing_should_be():
    x = torch.randn(2**15)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert (Dropout(1.0)(x) == 0).all()


def test_gradients_are_those_of_finite_differences(by):
    def attended(*given):
        torch.manual_seed(1)
        return drop_and_attend(*given, 0.3, 0.25)

    assert torch.autograd.gradcheck(attended, parts(7, 5), fast_mode=True)


def test_its_mean_is_attention_and_its_weights_are_whole_or_gone(by):
    query, key, _ = parts()
    apart = torch.eye(11, dtype=torch.float64).expand(1, 2, -1, -1)
    weights = (0.3 * query @ key.mT).softmax(-1)
    torch.manual_seed(0)
    found = torch.stack([drop_and_attend(query, key, apart, 0.3, 0.25) for _ in range(500)])
    ratio = found / weights
    assert torch.all((ratio.abs() < 1e-12) | ((ratio - 1 / 0.75).abs() < 1e-9))
    assert (ratio == 0).double().mean().item() == pytest.approx(0.25, abs=0.005)
    assert (ratio.mean(0) - 1).abs().max() < 0.13


def test_the_seed_of_torch_says_what_is_dropped(by):
    given, found = parts(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(drop_and_attend(*given, 0.3, 0.25))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_training_keeps_no_matrix_of_rows_by_rows():
    n, sizes = 700, []
    layer = kq.DatapointAttention(2, 8, heads=2, dropout=0.1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        layer(torch.randn(1, n, 2, 8)).sum().backward()
    assert 0 < max(sizes) <= 4 * n * 16


@pytest.mark.parametrize("kernel", ["general", "rbf"])
@pytest.mark.slow
def test_layers_with_dropout_are_on_average_those_without(kernel):
    torch.manual_seed(0)
    layer = kq.DatapointAttention(2, 4, heads=2, dropout=0.2, kernel=kernel).double()
    x = torch.randn(1, 300, 2, 4, dtype=torch.float64)
    attention = layer.block.attention
    with torch.no_grad():
        found = torch.stack([attention(x.flatten(2)) for _ in range(200)]).mean(0)
        assert (found - attention.eval()(x.flatten(2))).abs().max() < 0.03


def test_without_dropout_it_is_attention(by):
    query, key, value = parts()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    assert torch.allclose(drop_and_attend(query, key, value, 0.3, 0.0), expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.unchecked
def test_layers_compile():
    layer = kq.DatapointAttention(2, 4, heads=2, dropout=0.2)
    compiled, x = torch.compile(layer, backend="eager", fullgraph=True), torch.randn(1, 300, 2, 4)
    compiled(x).sum().backward()
    assert torch.allclose(compiled.eval()(x), layer(x), atol=1e-6)
