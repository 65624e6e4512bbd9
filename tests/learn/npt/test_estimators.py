"""NPTClassifier and NPTRegressor: what they learn, what a prediction depends on, and what they keep."""

import json
import pickle
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load, save
from typer.testing import CliRunner

import keyquery as kq
from keyquery.cli import app
from keyquery.learn.inputs.tables import Rows, columns_of, encode, fields_of
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import CHUNK, Plan, Samples, answers, drawing, table_loss

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


def test_a_prediction_depends_on_the_targets_of_the_context(numbers):
    model, X = numbers
    again = pickle.loads(pickle.dumps(model))
    before = again.predict(X)
    values = again.context_.values.clone()
    values[:, -1] += 3
    again.context_ = again.context_._replace(values=values)
    assert not np.allclose(again.predict(X), before)
    assert np.array_equal(model.predict(X), before)


def test_what_predictions_attend_to_is_read_anew_when_anything_has_changed():
    X, y = table(30)
    model = kq.NPTClassifier(**SMALL, steps=2).fit(X, y)

    def afresh():
        return pickle.loads(pickle.dumps(model)).predict_proba(X)

    said = [model.predict_proba(X)]
    with torch.no_grad():
        model.network_.encoder.layers[0].block.attention.value.weight.mul_(3)  # in place
    said.append(model.predict_proba(X))
    assert np.array_equal(said[-1], afresh())
    model.context_.values[:, 0] += 1
    said.append(model.predict_proba(X))
    assert np.array_equal(said[-1], afresh())
    said.append(model.set_params(random_state=1).fit(X, y).predict_proba(X))
    assert np.array_equal(said[-1], afresh())
    assert all(not np.allclose(one, other) for one, other in pairwise(said))


@pytest.mark.parametrize("rows", ["full", "induced", "none"])
def test_what_is_said_does_not_depend_on_how_many_are_asked_at_a_time(monkeypatch, rows):
    torch.manual_seed(0)
    network = TableNetwork((0, 3, 0), 8, 4, 2, rows=rows, points=5).double().eval()
    context, later = (
        Rows(torch.randn(n, 3).double(), torch.randint(3, (n, 3)), torch.rand(n, 3) < 0.3) for n in (30, 50)
    )
    memories = network.memories(context.within())
    said = []
    for size in (1, 7, 64, 256):
        monkeypatch.setitem(CHUNK, "cpu", size)
        said.append(answers(network, later, memories))
    assert said[0].std() > 1e-3
    assert max((one - said[0]).abs().max().item() for one in said[1:]) < 1e-12


def test_the_context_is_what_was_learned_from_some_of_it_or_all():
    X, y = table(100)
    usual = kq.NPTClassifier(**SMALL, steps=2).fit(X, y)
    assert len(usual.context_rows_) == 80  # what was held out, to stop early, is no context unless asked for
    some = kq.NPTClassifier(**SMALL, steps=2, context=20).fit(X, y)
    assert set(some.context_rows_) < set(usual.context_rows_)
    share = [np.mean(y[model.context_rows_] == "yes") for model in (usual, some)]
    assert abs(share[0] - share[1]) <= 1 / 20
    whole = kq.NPTClassifier(**SMALL, steps=2, context="all").fit(X, y)
    assert sorted(whole.context_rows_) == list(range(100))
    assert not whole.context_.hidden[:, -1].any()


def test_rows_without_a_target_are_seen_where_that_is_asked_for():
    X, y = table(60)
    y = np.where(np.arange(60) % 3 == 0, None, y)
    model = kq.NPTClassifier(**SMALL, steps=2, semi_supervised=True).fit(X, y)
    bare = model.context_.hidden[:, -1].numpy()
    assert {*model.context_rows_[bare]} == {*range(0, 60, 3)}
    assert len(model.classes_) == 2
    with pytest.raises(ValueError, match=r"y must have a target for every row, and row .* semi_supervised=True"):
        kq.NPTClassifier(**SMALL, steps=2).fit(X, y)
    some = kq.NPTClassifier(**SMALL, steps=2, semi_supervised=True, context=12).fit(X, y)
    assert len(some.context_rows_) == 12  # of which as many have no target as of all
    assert some.context_.hidden[:, -1].sum() == round(12 * 20 / 52)


def test_targets_that_are_masked_are_missing():
    X, target = table(30)[0], np.ma.masked_array(np.arange(30.0), np.arange(30) < 6)
    model = kq.NPTRegressor(**SMALL, steps=2, semi_supervised=True).fit(X, target)
    assert {*model.context_rows_[model.context_.hidden[:, -1].numpy()]} == {*range(6)}
    with pytest.raises(ValueError, match="y must have a target for every row, and row 0 has none"):
        kq.NPTRegressor(**SMALL, steps=2).fit(X, target)


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
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "kernel", ["symmetric", pytest.param("rbf", marks=pytest.mark.slow), pytest.param("split", marks=pytest.mark.slow)]
)
def test_every_kernel_learns(kernel):
    X = np.random.default_rng(0).normal(size=(60, 2))
    model = kq.NPTRegressor(**SMALL, steps=120, kernel=kernel).fit(X, X[:, 0])
    assert model.score(X, X[:, 0]) > 0.7
    assert model.network_.encoder.layers[0].block.attention.kernel == kernel


def test_it_trains_in_short_floats_too():
    network = TableNetwork((0, 3, 0), 8, 2, 2)
    rows = Rows(torch.randn(20, 3), torch.randint(3, (20, 3)), torch.zeros(20, 3, dtype=torch.bool))
    draw = drawing(Samples(rows, np.arange(20), np.arange(0), np.arange(0)), network.sizes, Plan(), 10, None)
    batch = draw(5, torch.Generator().manual_seed(0))
    exact = table_loss(network, batch)
    with torch.autocast("cpu", torch.bfloat16):
        short = table_loss(network, batch)
    short.backward()
    assert short.dtype == torch.float32
    assert short.item() == pytest.approx(exact.item(), rel=0.05)


# Tables


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
    for other in (boxed, kinds, rows, frame.to_numpy(dtype=object), kq.data.load_table(path)):
        found = encode(columns_of(other), fields)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True)), type(other)


def test_a_table_with_a_target_is_fitted_as_it_is_read(tmp_path):
    X, y = table(40)
    path = tmp_path / "table.csv"
    X.assign(answer=y).to_csv(path, index=False)
    read = kq.data.load_table(path, target="answer")
    model = kq.NPTClassifier(**SMALL, steps=3).fit(read)
    assert model.classes_.tolist() == ["no", "yes"]
    assert list(model.feature_names_in_) == ["size", "noise", "colour"]
    assert model.score(read) == model.score(X, y)


def test_a_category_that_training_did_not_have_counts_as_missing(fitted):
    X, _ = table(3, seed=5)
    strange, missing = X.copy(), X.copy()
    strange["colour"], missing["colour"] = ["green", "pink", "red"], [None, None, "red"]
    with pytest.warns(UserWarning, match="column 'colour' of X holds categories .*: 'green', 'pink'; they"):
        found = fitted.predict_proba(strange)
    assert np.array_equal(found, fitted.predict_proba(missing))


def test_numbers_that_are_names_are_the_same_with_gaps_and_without():
    whole = pd.DataFrame({"kind": pd.Series([1, 2, 3]).astype("category")})
    gaps = pd.DataFrame({"kind": pd.Series([1, None, 3]).astype("category")})  # of floats, by pandas
    fields = fields_of(columns_of(whole))
    assert fields[0].categories == ("1", "2", "3")
    found = encode(columns_of(gaps), fields)
    assert found.codes[:, 0].tolist() == [0, 0, 2]
    assert found.hidden[:, 0].tolist() == [False, True, False]
    assert not encode(columns_of(np.array([[1.0], [2.0]])), fields).hidden.any()


# Keeping


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
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), model.predict_proba(X))
    with pytest.raises(ValueError, match="is not a saved NPTRegressor"):
        kq.NPTRegressor.load(tmp_path / "model.safetensors")


def test_numbers_are_saved_whole(tmp_path, numbers):
    model, X = numbers
    model.save(tmp_path / "model.safetensors")
    assert np.array_equal(kq.NPTRegressor.load(tmp_path / "model.safetensors", "cpu").predict(X), model.predict(X))


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


def test_keyquery_look_reads_what_was_saved(tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 2))
    model = kq.NPTRegressor(**SMALL, steps=2, kernel="symmetric").fit(X, X[:, 0])
    path, out = tmp_path / "model.safetensors", tmp_path / "look.json"
    model.save(path)
    found = CliRunner().invoke(app, ["look", str(path), "--json", str(out), "--quiet"])
    assert found.exit_code == 0, found.output
    reading = kq.Reading.load(out)
    assert [head["name"] for head in reading.heads[::2]] == [f"encoder.layers.{i}.block.attention.0" for i in (0, 1)]
    assert min(head["raw"]["symmetry"] for head in reading.heads) > 1 - 1e-6
    on_data = kq.look(model.network_, inputs=[model.context_.within()._asdict()])
    assert all(head["on_data"]["skew"] < 1e-6 for head in on_data.heads)


# What a prediction leans on


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
    assert found.plot().axes[0].get_yticklabels()[0].get_text()
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
