"""What NPT estimators say of bad input; nothing that was learned is lost by it."""

import numpy as np
import pandas as pd
import pytest
import torch

import keyquery as kq
from keyquery.learn.npt import base

SMALL = {"embedding": 4, "depth": 2, "heads": 2, "steps": 2, "device": "cpu", "random_state": 0}
X = np.random.default_rng(0).normal(size=(12, 2))
Y = np.arange(12) % 2


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([[1]] * 12, "column 'thing' of X holds list: .* strings or categories"),
        ([1, "a"] * 6, "column 'thing' of X holds int and str: the argument must"),
        (pd.date_range("2026-01-01", periods=12), "column 'thing' of X is of dtype datetime"),
        (np.full(12, np.inf), "column 'thing' of X holds infinity: values must be"),
        (np.linspace(-1e300, 1e300, 12), "X holds values too large to be standardised"),
        (1j * X[:, 0], "Complex data not supported: column 'thing' of X"),
    ],
)
def test_columns_that_are_neither_numbers_nor_categories_are_told(column, said):
    with pytest.raises((TypeError, ValueError), match=said):
        kq.NPTClassifier(**SMALL).fit(pd.DataFrame({"size": X[:, 0], "thing": column}), Y)


@pytest.mark.parametrize(
    ("given", "y", "options", "said"),
    [
        (X[0], Y, {}, r"X must be a table \(rows, columns\), got shape \(2,\)\. Reshape your data"),
        ([[1, 2], [3]], Y, {}, "its rows differ in length"),
        (pd.DataFrame(X, columns=["a", "a"]), Y, {}, "more than once: a"),
        (X, None, {}, "NPTRegressor requires y to be passed, but the target y is None"),
        (X, Y[:3], {}, r"inconsistent numbers of samples: \[12, 3\]"),
        (X, X, {}, r"y should be a 1d array, got an array of shape \(12, 2\)"),
        (X, [np.nan] * 12, {}, "a target for every row, and row 0 has none: set semi_supervised=True"),
        (X, [None] * 12, {"semi_supervised": True}, "y has no targets: all 12 are missing"),
        (X, [1.0] + [None] * 11, {"semi_supervised": True}, "1 of them with a target, and at least 2 are required"),
        (X, np.arange(12) * 1e300, {}, "y holds values too large to be standardised"),
        (X, Y, {"embedding": 0}, "embedding must be at least 1, got 0"),
        (X, Y, {"heads": 3}, "heads must divide embedding: 3 does not divide 4"),
        (X, Y, {"kernel": "symetric"}, "kernel must be one of .*; did you mean 'symmetric'"),
        (X, Y, {"row_attention": "linear"}, "row_attention must be one of 'full', 'induced', 'none', got 'linear'"),
    ],
    ids=str,
)
def test_what_cannot_be_fitted_is_told(given, y, options, said):
    with pytest.raises(ValueError, match=said):
        kq.NPTRegressor(**SMALL | options).fit(given, y)


def test_a_target_that_is_held_out_and_far_from_all_others_is_told():
    X = np.random.default_rng(0).normal(size=(30, 2))
    model = kq.NPTRegressor(**SMALL).fit(X, X[:, 0])
    held = np.setdiff1d(np.arange(30), model.context_rows_)
    with pytest.raises(ValueError, match=r"y holds values too large: up to 1e.* standard deviations of the others"):
        model.fit(X, np.where(np.arange(30) == held[0], 1e200, X[:, 0]))


def test_one_row_and_one_class():
    for model in (kq.NPTClassifier, kq.NPTRegressor):
        with pytest.raises(ValueError, match=r"X has 1 sample\(s\), 1 of them with a target"):
            model(**SMALL).fit(X[:1], Y[:1])
        assert len(model(**SMALL).fit(X[:2], Y[:2]).context_rows_) == 2
    with pytest.raises(ValueError, match="y holds only one class, 0: a classifier needs two or more"):
        kq.NPTClassifier(**SMALL).fit(X, np.zeros(12, dtype=int))


def test_what_is_wrong_at_predict_leaves_the_fit_as_it_was():
    given = pd.DataFrame({"size": np.arange(12.0), "colour": ["red", "blue"] * 6})
    model = kq.NPTClassifier(**SMALL).fit(given, Y)
    before = model.predict_proba(given)
    for message, table in {
        "X has 1 features, but NPTClassifier is expecting 2": [[1.0]],
        "Feature names must be in the same order": given[["colour", "size"]],
        "column 'size' of X was numeric in training, but now holds categories": given.assign(size="a"),
        "X holds values too large: up to .* standard deviations": given.assign(size=1e200),
    }.items():
        with pytest.raises(ValueError, match=message):
            model.predict(table)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(given, Y[:3])
    assert np.array_equal(model.predict_proba(given), before)


def test_a_table_that_does_not_fit_is_an_error_with_advice():
    wide = np.zeros((10, 2_000), dtype=np.float32)
    message = 'training on 10 rows and 2001 columns .* does not fit into memory.*row_attention="induced"'
    with pytest.raises(MemoryError, match=message):
        kq.NPTRegressor(**{**SMALL, "embedding": 512, "heads": 8}).fit(wide, np.arange(10.0))


def test_out_of_memory_trains_again_with_checkpointing(monkeypatch):
    usual, runs = kq.NPTClassifier(**SMALL).fit(X, Y), []
    fit_network = base.fit_network

    def short_of_memory(network, *others, **options):
        runs.append(network.encoder.thrifty)
        if not network.encoder.thrifty:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return fit_network(network, *others, **options)

    monkeypatch.setattr(base, "fit_network", short_of_memory)
    again = kq.NPTClassifier(**SMALL).fit(X, Y)
    assert runs == [False, True]
    assert np.allclose(again.predict_proba(X), usual.predict_proba(X), atol=1e-5)


def test_a_constant_target_is_predicted_exactly(tmp_path):
    X = np.random.default_rng(0).normal(size=(30, 2))
    model = kq.NPTRegressor(embedding=4, depth=1, heads=1, steps=2, random_state=0, device="cpu").fit(
        X, np.full(30, 7.3)
    )
    assert np.array_equal(model.predict(X), np.full(30, 7.3))
    model.save(tmp_path / "model.safetensors")
    assert np.array_equal(kq.NPTRegressor.load(tmp_path / "model.safetensors", "cpu").predict(X), np.full(30, 7.3))
    assert model.explain(X[:1], rows=0).predicted == 7.3
