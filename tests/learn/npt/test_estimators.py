"""NPTClassifier and NPTRegressor: what they learn, what a prediction depends on, and what they keep."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import keyquery as kq
from keyquery.learn.npt.training import CHUNK, Plan

SMALL = {"embedding": 8, "depth": 2, "heads": 2, "device": "cpu", "random_state": 0}


def table(count, seed=0):
    """Two numbers, one of them with gaps, and a category; the class is of the first and of the category."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": rng.normal(size=count) * 10 + 50, "noise": rng.normal(size=count)})
    frame["colour"] = pd.Categorical(rng.choice(["red", "blue"], count))
    truth = (frame["size"] > 50).to_numpy() ^ (frame["colour"] == "red").to_numpy()
    frame.loc[rng.random(count) < 0.2, "noise"] = np.nan
    frame.loc[rng.random(count) < 0.05, "colour"] = None
    return frame, np.where(truth, "yes", "no")


@pytest.fixture(scope="module")
def fitted():
    X, y = table(120)
    return kq.NPTClassifier(**SMALL, steps=250).fit(X, y)


@pytest.fixture(scope="module")
def numbers():
    X = np.random.default_rng(0).normal(size=(60, 3))
    return kq.NPTRegressor(**SMALL, steps=150).fit(X, 100 + 7 * X[:, 0]), X


def test_it_learns_from_numbers_and_categories_with_gaps(fitted):
    X, y = table(100, seed=1)
    assert fitted.score(X, y) > 0.8
    found = fitted.predict_proba(X)
    assert np.allclose(found.sum(1), 1)
    assert np.array_equal(fitted.classes_[found.argmax(1)], fitted.predict(X))
    assert list(fitted.feature_names_in_) == ["size", "noise", "colour"]


def test_numbers_are_told_in_units_of_the_target(numbers):
    model, _ = numbers
    X = np.random.default_rng(1).normal(size=(50, 3))
    assert model.score(X, 100 + 7 * X[:, 0]) > 0.8
    residual = 100 + 7 * X[:, 0] - model.predict(X)
    whole = 1 - np.square(residual).sum() / np.square(7 * (X[:, 0] - X[:, 0].mean())).sum()
    assert model.score(X, 100 + 7 * X[:, 0]) == pytest.approx(whole)


@pytest.mark.parametrize("row_attention", ["full", "induced", "none"])
def test_a_prediction_does_not_depend_on_what_else_is_asked(row_attention):
    X, y = table(40)
    model = kq.NPTClassifier(**SMALL, steps=10, row_attention=row_attention).fit(X, y)
    rows, _ = table(CHUNK["cpu"] + 9, seed=2)
    whole = model.predict_proba(rows)
    assert np.array_equal(model.predict_proba(rows[::-1])[::-1], whole)
    for some in (rows[5:6], rows[60:], rows[CHUNK["cpu"] :]):
        assert np.allclose(model.predict_proba(some), whole[some.index], atol=1e-12)
    other = rows.copy()
    other.loc[1:, "size"] = 1e3
    assert np.array_equal(model.predict_proba(other)[0], whole[0])


def test_a_prediction_depends_on_the_fitted_rows_and_weights(numbers):
    model, X = numbers
    again = pickle.loads(pickle.dumps(model))
    before = again.predict(X)
    values = again.context_.values.clone()
    values[:, -1] += 3
    again.context_ = again.context_._replace(values=values)
    assert not np.allclose(again.predict(X), before), "the kept support set outlived its rows"
    assert np.array_equal(model.predict(X), before)
    again.set_params(random_state=1, steps=2).fit(X, X[:, 0])
    assert np.array_equal(again.predict(X), pickle.loads(pickle.dumps(again)).predict(X))
    assert len(again.context_rows_) == 48  # what was held out, to stop early, is not attended to


def test_rows_without_a_target_are_seen_where_that_is_asked_for():
    X, y = table(60)
    y = np.where(np.arange(60) % 3 == 0, None, y)
    model = kq.NPTClassifier(**SMALL, steps=2, semi_supervised=True).fit(X, y)
    bare = model.context_.hidden[:, -1].numpy()
    assert {*model.context_rows_[bare]} == {*range(0, 60, 3)}
    assert len(model.classes_) == 2
    with pytest.raises(ValueError, match=r"y must have a target for every row, and row .* semi_supervised=True"):
        kq.NPTClassifier(**SMALL, steps=2).fit(X, y)
    target = np.ma.masked_array(np.arange(60.0), np.arange(60) < 6)
    model = kq.NPTRegressor(**SMALL, steps=2, semi_supervised=True).fit(X, target)
    assert {*model.context_rows_[model.context_.hidden[:, -1].numpy()]} == {*range(6)}


@pytest.mark.parametrize("semi_supervised", [False, True])
def test_targets_that_are_held_out_reach_training_nowhere(semi_supervised):
    class Once(kq.NPTRegressor):
        plan = Plan(checks=1)  # one check, at the end: it chooses nothing

    X, _ = table(80)
    target = np.arange(80.0)
    model = Once(**SMALL, steps=6, semi_supervised=semi_supervised).fit(X, target)
    assert len(model.context_rows_) == 64
    spoilt = np.where(np.isin(np.arange(80), model.context_rows_), target, 1e6)
    other = Once(**SMALL, steps=6, semi_supervised=semi_supervised).fit(X, spoilt)
    assert other.history_[0]["validation_loss"] > 1e3 > model.history_[0]["validation_loss"]
    assert other.history_[0]["loss"] == model.history_[0]["loss"]
    assert np.array_equal(other.predict(X), model.predict(X))


@pytest.mark.parametrize("row_attention", ["full", "induced"])
def test_heads_and_explanations_of_a_file_are_those_of_the_model(tmp_path, row_attention):
    X, y = table(30)
    model = kq.NPTClassifier(**SMALL, steps=5, row_attention=row_attention, kernel="symmetric").fit(X, y)
    model.save(tmp_path / "model.safetensors")
    again = kq.NPTClassifier.load(tmp_path / "model.safetensors", device="cpu")
    assert again.explain(X[:1]) == model.explain(X[:1])
    assert min(head["raw"]["symmetry"] for head in kq.look(tmp_path / "model.safetensors").heads) > 1 - 1e-6
    slow, slower = (kq.NPTClassifier(**SMALL, steps=steps, lr=1e-9).fit(X, y).predict_proba(X) for steps in (1, 5))
    assert np.allclose(slow, slower, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("context.codes", lambda codes: codes + 50, "the support set has categories that the columns do not have"),
        ("context.codes", lambda codes: codes - 1, "the support set has categories that the columns do not have"),
        ("context.values", lambda values: values[:, :-1].contiguous(), "the support set does not match the columns"),
        ("context.values", lambda values: values * torch.nan, "the support set holds NaN or infinity"),
        ("classes", lambda classes: {**classes, "labels": ["yes"]}, "the classes do not match the target column"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused(tmp_path, fitted, name, change, said):
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["keyquery"])
    changed = tensors if name in tensors else facts
    changed[name] = change(changed[name])
    save_file(tensors, path, {"keyquery": json.dumps(facts)})
    with pytest.raises(ValueError, match=f"is not a complete NPTClassifier file: {said}"):
        kq.NPTClassifier.load(path)


def test_a_prediction_leans_on_the_column_that_tells_it(numbers):
    model, X = numbers
    found = model.explain(X[:1], rows=3)
    effects = [abs(one["effect"]) for one in found.columns]
    assert np.argmax(effects) == 0
    assert found.predicted == pytest.approx(model.predict(X[:1])[0])
    assert found.probability is None
    assert sum(one["attention"] for one in found.rows) + found.own == pytest.approx(1.0, abs=1e-5)
    assert [one["effect"] is None for one in found.rows] == [False] * 3 + [True] * (len(found.rows) - 3)
    attention = [one["attention"] for one in found.rows]
    assert attention == sorted(attention, reverse=True)
    # Effects by hand: the entry hidden, and the context without the row.
    hidden = X[:1].copy()
    hidden[0, 0] = np.nan
    assert found.columns[0]["effect"] == pytest.approx(model.predict(X[:1])[0] - model.predict(hidden)[0], abs=1e-4)
    without = pickle.loads(pickle.dumps(model))
    kept = without.context_rows_ != found.rows[0]["row"]
    without.context_ = without.context_.take(np.flatnonzero(kept))
    lost = model.predict(X[:1])[0] - without.predict(X[:1])[0]
    assert found.rows[0]["effect"] == pytest.approx(lost, abs=1e-4)
    assert found.rows[0]["values"] == pytest.approx(X[found.rows[0]["row"]], abs=1e-5)
    assert kq.Reading.load(found.to_json()) == found


@pytest.mark.parametrize("row_attention", ["full", "induced", "none"])
def test_leaning_has_a_picture(row_attention):
    X, y = table(30)
    model = kq.NPTClassifier(**SMALL, steps=3, row_attention=row_attention).fit(X, y)
    found = model.explain(X[:1], rows=2)
    left, *_ = found.plot().axes
    assert left.get_yticklabels()[0].get_text()
    assert "log-odds" in left.get_xlabel()
    assert found.own == {"none": 1.0, "induced": 0.0}.get(row_attention, found.own)
    assert found.predicted == model.predict(X[:1])[0]
    assert found.probability == pytest.approx(model.predict_proba(X[:1]).max())
    assert found.to_frame().shape == (3 + len(model.context_rows_), 5)
    with pytest.raises(ValueError, match="row must be a table with one row, such as X"):
        model.explain(X[:2])


def test_early_stopping_keeps_the_best():
    X, y = table(60)
    model = kq.NPTClassifier(**SMALL, steps=40)
    model.fit(X, y)
    best = min(row["validation_loss"] for row in model.history_)
    held = np.setdiff1d(np.arange(60), model.context_rows_)
    chosen = model.predict_proba(X.iloc[held])[np.arange(len(held)), (y[held] == "yes").astype(int)]
    assert -np.log(chosen).mean() == pytest.approx(best, rel=1e-4)
