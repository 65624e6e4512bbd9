"""NPTClassifier and NPTRegressor: what they learn, what a prediction depends on, and what they keep."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load, save

import keyquery as kq
from keyquery.learn.inputs.tables import columns_of, encode, fields_of
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


def test_the_same_seed_gives_the_same_and_leaves_torch_as_it_was():
    X, y = table(30)
    state = torch.get_rng_state()
    first, again, other = (
        kq.NPTClassifier(**{**SMALL, "random_state": seed}, steps=5).fit(X, y).predict_proba(X) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    slow, slower = (kq.NPTClassifier(**SMALL, steps=steps, lr=1e-9).fit(X, y).predict_proba(X) for steps in (1, 5))
    assert np.allclose(slow, slower, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_kinds_of_tables_mean_the_same(tmp_path):
    rows = [[1.5, "red", True], [None, "blue", False], [3.0, None, True]]
    frame = pd.DataFrame(rows, columns=["a", "b", "c"])
    boxed = frame.astype({"a": "Float64", "b": "string", "c": "boolean"})
    kinds = frame.astype({"b": "category", "c": "category"})
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    fields = fields_of(columns_of(frame))
    assert [field.categories for field in fields] == [None, ("blue", "red"), ("False", "True")]
    assert (fields[0].mean, fields[0].scale) == (2.25, 0.75)
    expected = encode(columns_of(frame), fields)
    assert expected.values[:, 0].tolist() == [-1.0, 0.0, 1.0]
    assert expected.hidden.tolist() == [[False, False, False], [True, False, False], [False, True, False]]
    assert expected.codes[:, 1:].tolist() == [[1, 1], [0, 0], [0, 1]]
    with_gap = encode(
        columns_of(frame.assign(c=pd.Series([1, None, 3]).astype("category"))),
        [
            *fields[:2],
            fields_of(columns_of(pd.DataFrame({"c": pd.Series([1, 2, 3]).astype("category")})))[0],
        ],
    )
    assert (with_gap.codes[:, 2].tolist(), with_gap.hidden[:, 2].tolist()) == ([0, 0, 2], [False, True, False])
    for other in (boxed, kinds, rows, frame.to_numpy(dtype=object), kq.data.load_table(path)):
        found = encode(columns_of(other), fields)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True)), type(other)


def test_a_category_that_training_did_not_have_counts_as_missing(fitted):
    X, _ = table(3, seed=5)
    strange, missing = X.copy(), X.copy()
    strange["colour"], missing["colour"] = ["green", "pink", "red"], [None, None, "red"]
    with pytest.warns(UserWarning, match="column 'colour' of X holds categories .*: 'green', 'pink'; they"):
        found = fitted.predict_proba(strange)
    assert np.array_equal(found, fitted.predict_proba(missing))


@pytest.mark.parametrize("row_attention", ["full", "induced"])
def test_it_is_saved_whole(tmp_path, row_attention):
    X, y = table(30)
    model = kq.NPTClassifier(**SMALL, steps=5, row_attention=row_attention, kernel="symmetric").fit(X, y)
    model.save(tmp_path / "model.safetensors")
    again = kq.NPTClassifier.load(tmp_path / "model.safetensors", device="cpu")
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.history_ == model.history_
    assert repr(again) == repr(model)
    assert again.explain(X[:1]) == model.explain(X[:1])
    assert min(head["raw"]["symmetry"] for head in kq.look(tmp_path / "model.safetensors").heads) > 1 - 1e-6
    with pytest.raises(ValueError, match="is not a saved NPTRegressor"):
        kq.NPTRegressor.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("what", ["codes", "rows", "weights", "classes"])
def test_a_file_that_was_tampered_with_is_refused(tmp_path, fitted, what):
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    said, tensors = json.loads(data[8 : 8 + size])["__metadata__"]["keyquery"], load(data)
    facts = json.loads(said)
    if what == "codes":
        tensors["context.codes"] += 50
    elif what == "rows":
        tensors["context.values"] = tensors["context.values"][:, :-1].contiguous()
    elif what == "weights":
        tensors["network.index"] = tensors["network.index"] * torch.nan
    else:
        facts["classes"]["labels"] = ["yes"]
    path.write_bytes(save(tensors, {"keyquery": json.dumps(facts)}))
    with pytest.raises(ValueError, match="is not a complete NPTClassifier file: "):
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
