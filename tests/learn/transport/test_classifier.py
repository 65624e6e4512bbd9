"""TransportClassifier against Bayes' rule, brute-force matchings and what it promises of sequences."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch

import keyquery as kq
from keyquery.learn.transport.classifier import EXACT, align, centres

# Means of Gaussian classes with covariance 2I, as published: pairs are 2i apart, of three classes in the mean.
SIDE = 3 / (1 + math.sqrt(2))
MEANS = {2: np.array([[0, -1], [0, 1.0]]), 3: np.array([[-SIDE, 0], [SIDE, 0], [0, SIDE]])}


def drawn(classes, i, count, steps, seed):
    """Sequences (count, steps, 2) of Gaussian points, as many of each class as can be."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    return i * MEANS[classes][y][:, None] + math.sqrt(2) * rng.normal(size=(count, steps, 2)), y


def bayes(classes, i, steps=1):
    """The accuracy of Bayes' rule: the integral of the largest density over the mean of the steps, on a grid."""
    variance = 2 / steps
    grid = np.linspace(-9 - 2 * i, 9 + 2 * i, 601)
    at = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1)
    squares = [np.square(at - i * mean).sum(-1) for mean in MEANS[classes]]
    largest = np.exp(-np.min(squares, 0) / (2 * variance)) / (2 * math.pi * variance)
    return float(largest.sum() * (grid[1] - grid[0]) ** 2 / classes)


@pytest.mark.parametrize(
    ("geometry", "match", "classes", "i"),
    [
        ("learned", "ot", 2, 1),
        ("learned", "ot", 3, 3),
        ("simplex", "mean", 3, 2),
        pytest.param("circle", "random", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_it_comes_within_two_points_of_bayes(geometry, match, classes, i):
    model = kq.TransportClassifier(geometry, match, random_state=0, device="cpu")
    accuracy = model.fit(*drawn(classes, i, 1200, 1, seed=i)).score(*drawn(classes, i, 30_000, 1, seed=10 + i))
    assert abs(accuracy - bayes(classes, i)) < 0.02  # a sampling error of at most .003


def test_the_steps_of_a_sequence_are_evidence_together():
    model = kq.TransportClassifier(random_state=0, device="cpu").fit(*drawn(2, 1, 90, 20, seed=0))
    assert abs(model.score(*drawn(2, 1, 8000, 20, seed=1)) - bayes(2, 1, steps=20)) < 0.005
    assert abs(model.score(*drawn(2, 1, 30_000, 1, seed=2)) - bayes(2, 1)) < 0.02  # any other length will do


def test_draws_go_to_points_at_the_least_cost_there_is():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 2, generator=generator, dtype=torch.float64)
    target = torch.tensor([0, 1] * 5 + [2])  # classes one among the other, as they come
    best = align(x, target, 3, "ot", seed=4)
    drawn = align(x, target, 3, "random", seed=4)
    for number in range(3):
        rows = target == number
        wide = torch.cat((x[rows], torch.zeros(int(rows.sum()), 1)), 1)  # a feature of 0 for the third dimension
        orders = itertools.permutations(range(rows.sum()))
        least = min(float((wide - drawn[rows][list(order)]).square().sum()) for order in orders)
        assert float((wide - best[rows]).square().sum()) == pytest.approx(least, rel=1e-12)
        assert torch.equal(best[rows].sort(0).values, drawn[rows].sort(0).values)  # the same draws
    assert not align(x, target, 3, "mean", seed=4).any()
    assert align(x, target, 3, "random", seed=5).std() == pytest.approx(1, abs=0.3)


def test_large_classes_are_matched_in_parts_and_that_is_said():
    x = torch.randn(2 * EXACT + 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.zeros(len(x), dtype=torch.long)
    said = "a class of 2,003 points, more than 1,000, is matched exactly only within mini-batches of 250"
    with pytest.warns(UserWarning, match=said):
        found = align(x, target, 1, "ot", seed=0)
    drawn = align(x, target, 1, "random", seed=0)
    assert torch.equal(found.sort(0).values, drawn.sort(0).values)
    ranks = torch.stack([part[:, 0].argsort().argsort() for part in (x, found)]).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.98  # nearly sorted alike, though only within nine parts


@pytest.mark.parametrize("classes", [2, 3, 4, 7])
def test_on_a_simplex_the_nearest_centre_is_the_likeliest_class(classes):
    shares = torch.distributions.Dirichlet(torch.ones(classes).double()).sample((500,))
    where = centres("simplex", classes, classes + 1)
    assert torch.equal(torch.cdist(shares @ where, where).argmin(1), shares.argmax(1))
    sides = torch.pdist(where)
    circle = torch.pdist(centres("circle", classes, 2))
    assert torch.allclose(sides, circle.min())
    assert torch.allclose(centres("circle", classes, 2).norm(dim=1), torch.tensor(3.0 * classes).double())
    if classes < 4:
        assert torch.allclose(sides, circle)


def test_learned_centres_move_and_others_do_not():
    X, y = drawn(2, 2, 100, 1, seed=0)
    fixed = kq.TransportClassifier("simplex", random_state=0, device="cpu").fit(X, y).network_.centres
    assert torch.equal(fixed, centres("simplex", 2, 2).float())
    sides = []
    for i in (1, 4):
        model = kq.TransportClassifier("learned", random_state=0, device="cpu").fit(*drawn(2, i, 600, 1, seed=0))
        sides.append(float(torch.pdist(model.network_.centres.detach())))
    assert sides[1] > max(sides[0], 4.0)  # the surer the classes, the farther apart; they start at 4


@pytest.fixture(scope="module")
def fitted():
    X, y = drawn(3, 2, 120, 4, seed=0)
    names = np.array(["left", "right", "up"])
    return kq.TransportClassifier(random_state=0, epochs=30, device="cpu").fit(X, names[y])


def test_the_score_of_a_sequence_is_the_product_of_its_steps(fitted):
    rng = np.random.default_rng(1)
    ragged = [rng.normal(size=(length, 2)) for length in rng.integers(1, 6, size=9)]
    for sequence, row in zip(ragged, fitted.predict_proba(ragged), strict=True):
        product = fitted.predict_proba(sequence).prod(0)  # a table: its rows are samples of one step
        assert row == pytest.approx(product / product.sum(), rel=1e-9)


def test_sequences_come_in_many_forms(fitted):
    X, _ = drawn(3, 2, 6, 4, seed=3)
    series = kq.data.series.Series(tuple(X), None, ())
    for same in (list(X), torch.from_numpy(X), X.tolist(), series):
        assert np.array_equal(fitted.predict_proba(same), fitted.predict_proba(X))


def test_it_stops_when_it_gets_no_better():
    X, y = drawn(2, 1, 100, 1, seed=0)
    model = kq.TransportClassifier(random_state=0, epochs=400, device="cpu").fit(X, y)
    losses = [row["validation_loss"] for row in model.history_]
    assert len(losses) < 400
    assert int(np.argmin(losses)) == len(losses) - 21


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_same_answers():
    X, y = drawn(3, 2, 900, 1, seed=0)
    model = kq.TransportClassifier(random_state=0, device="cuda").fit(X, y)
    again = kq.TransportClassifier(random_state=0, device="cuda").fit(X, y)
    test = drawn(3, 2, 30_000, 1, seed=1)
    assert np.array_equal(model.predict_proba(X), again.predict_proba(X))
    assert abs(model.score(*test) - bayes(3, 2)) < 0.02
    found = model.predict_proba(X)
    assert np.allclose(model.set_params(device="cpu").predict_proba(X), found, atol=1e-9)


NAN = float("nan")
X = np.random.default_rng(0).normal(size=(12, 2))
Y = np.arange(12) % 2


def small(**options):
    return kq.TransportClassifier(**{"epochs": 2, "random_state": 0, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("given", "y", "options", "said"),
    [
        (X, ["a"] * 12, {}, "y holds only one class, 'a': a classifier needs two or more"),
        (X, None, {}, "TransportClassifier requires y to be passed, but the target y is None"),
        ([X, np.where(X > 1, NAN, X)], [0, 1], {}, "X must be finite; .* of 24 points hold NaN, the first in sample 1"),
        ([["a", 1.0]] * 12, Y, {}, "X must be numeric, but column '0' holds categories: encode them as numbers"),
        (X, Y, {"geometry": "cirle"}, "geometry must be one of 'circle', .* did you mean 'circle'?"),
        (X, Y, {"match": "exact"}, "match must be one of 'ot', 'random', 'mean', got 'exact'"),
        (X, Y, {"hidden": 32}, "hidden must be a sequence of integers, got 32"),
        (X, Y, {"hidden": (32, 0)}, "hidden must be at least 1, got 0"),
        (X, Y, {"epochs": 0}, "epochs must be at least 1, got 0"),
        (X, Y, {"device": "tpu"}, "device"),
    ],
    ids=str,
)
@pytest.mark.unchecked
def test_what_cannot_be_fitted_is_told(given, y, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        small(**options).fit(given, y)


def test_what_is_wrong_at_predict_leaves_the_fit_as_it_was():
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = small().fit(frame, Y)
    before = model.predict_proba(frame)
    for said, given in {
        "X has 1 features, but TransportClassifier is expecting 2": np.ones((2, 5, 1)),
        "Feature names must be in the same order": frame[["b", "a"]],
        "X holds values too large: up to .* standard deviations": frame.assign(a=1e200),
    }.items():
        with pytest.raises(ValueError, match=said):
            model.predict(given)
    with pytest.warns(UserWarning, match="X does not have valid feature names, but TransportClassifier was fitted"):
        assert np.array_equal(model.predict_proba(X), before)
    with pytest.raises(AttributeError, match="This TransportClassifier instance is not fitted yet"):
        small().predict(X)
