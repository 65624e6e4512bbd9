"""SeriesClassifier: what it learns, what it ignores, what it keeps, and what it says of bad input."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import keyquery as kq
from keyquery.learn.base import hold_out
from keyquery.learn.data.series import Series
from keyquery.learn.fitting import epochs_of
from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.series.base import Labelled
from keyquery.learn.series.classifier import augmented, temperature_of
from keyquery.learn.series.network import BINS, SeriesNetwork, stretches

SMALL = {"width": 16, "heads": 2, "depth": 1, "device": "cpu", "random_state": 0}
QUICK = {**SMALL, "width": 8, "epochs": 1}
NAN = float("nan")
GOOD, LABELS = np.arange(20.0).reshape(5, 4), ["a", "b", "a", "b", "a"]


def bumps(count, seed=0, least=24, most=40):
    """Series of two dims and many lengths: class 1 has a bump in its second dim, class 0 a dip, at any place."""
    rng = np.random.default_rng(seed)
    series, labels, starts = [], np.arange(count) % 2, []
    for label in labels:
        values = rng.normal(size=(rng.integers(least, most), 2)) / 4
        starts.append(rng.integers(0, len(values) - 7))
        values[starts[-1] : starts[-1] + 7, 1] += (2 * label - 1) * 3 * np.hanning(7)
        series.append(values * [10, 0.1] + [100, -3])
    return series, labels, starts


@pytest.fixture(scope="module")
def fitted():
    X, y, _ = bumps(80)
    return kq.SeriesClassifier(**SMALL, epochs=15, lr=5e-3).fit(X, y)


def test_it_learns_what_stands_at_any_place(fitted):
    X, y, _ = bumps(60, seed=1)
    assert fitted.score(X, y) > 0.9
    probabilities = fitted.predict_proba(X)
    assert probabilities.shape == (60, 2)
    assert np.allclose(probabilities.sum(1), 1)
    assert np.array_equal(fitted.classes_[probabilities.argmax(1)], fitted.predict(X))


@pytest.mark.parametrize("attention", ["primal+", pytest.param("primal", marks=pytest.mark.slow), "rbf"])
def test_every_attention_learns(attention):
    X, y, _ = bumps(60, least=16, most=17)
    model = kq.SeriesClassifier(**{**SMALL, "depth": 2}, attention=attention, epochs=15, lr=5e-3).fit(X, y)
    assert model.score(X, y) > 0.9
    layers = [type(block.attention).__name__ for block in model.network_.encoder.blocks]
    primal = {"primal": 2, "primal+": 1}.get(attention, 0)
    assert layers == ["Attention"] * (2 - primal) + ["PrimalAttention"] * primal


def test_padding_the_batch_and_the_axis_do_not_matter(fitted):
    X, y, _ = bumps(6, seed=2)
    X.insert(2, np.tile(X[0], (30, 1)))  # a long one: the others are not padded to it
    wide = np.full((7, max(map(len, X)) + 5, 2), NAN)
    for row, values in zip(wide, X, strict=True):
        row[: len(values)] = values
    expected = np.concatenate([fitted.predict_proba([values]) for values in X])
    shapes = []
    hook = fitted.network_.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    for same in (X, wide, torch.from_numpy(wide)):
        assert np.allclose(fitted.predict_proba(same), expected, atol=1e-6)
    hook.remove()
    assert max(length for count, length in shapes if count > 1) < 64
    last, labels = np.random.default_rng(0).normal(size=(6, 2, 9)), y[:6]
    first = kq.SeriesClassifier(**QUICK).fit(Series(tuple(last.transpose(0, 2, 1)), labels, ("0", "1")))
    second = kq.SeriesClassifier(**QUICK, axis=2).fit(last, labels)
    assert np.array_equal(second.predict_proba(last), first.predict_proba(last.transpose(0, 2, 1)))
    with pytest.warns(UserWarning, match=r"series of 2 steps and 9 dims; if it is \(n, dims, length\), set axis=2"):
        kq.SeriesClassifier(**QUICK).fit(last, labels)


def test_series_of_one_token_and_longer_ones_than_any_in_training(fitted):
    assert fitted.predict([[[100.0, -3.0]], np.tile([100.0, -3.0], (400, 1))]).shape == (2,)
    X = np.array([[-1.0], [1.0]] * 10)
    model = kq.SeriesClassifier(**SMALL, epochs=20, lr=0.02).fit(X, np.sign(X[:, 0]))
    assert model.score(X, np.sign(X[:, 0])) == 1


# The network


@pytest.mark.parametrize(("attention", "tokens"), [("primal", "plain"), ("general", "multiscale")])
def test_padding_and_missing_tokens_reach_nothing(attention, tokens):
    network = SeriesNetwork(2, 3, 16, 2, 2, attention, rank=4, tokens=tokens).eval()
    values, real = torch.randn(4, 20, 2), torch.ones(4, 20, dtype=torch.bool)
    real[:, 13:], real[1, 4:6] = False, False
    first = network(values, real)
    values[~real] = NAN
    assert torch.equal(network(values, real), first)
    assert torch.allclose(network(values[:, :13], real[:, :13]), first, atol=1e-5)
    torch.nn.functional.cross_entropy(network(values, real), torch.tensor([0, 1, 2, 0])).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in network.parameters())


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
def test_stretches_are_those_of_adaptive_pooling(length):
    x, real = torch.randn(1, length + 3, 4), torch.zeros(1, length + 3, dtype=torch.bool)
    real[:, 1 : length + 1] = True
    expected = torch.nn.functional.adaptive_avg_pool1d(x[:, 1 : length + 1].mT, BINS).mT
    assert torch.allclose(stretches(real, BINS) @ x, expected, atol=1e-6)


# Training


def test_augmented_series_are_learned_from():
    X, y, _ = bumps(20)
    plain, other = (kq.SeriesClassifier(**QUICK, augment=share).fit(X, y).predict_proba(X) for share in (0.0, 0.1))
    assert not np.allclose(plain, other)


def test_training_stops_early_and_keeps_the_best_epoch():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 10)), np.arange(40) % 2  # nothing to learn
    model = kq.SeriesClassifier(**SMALL, epochs=60, patience=3, lr=5e-3, refit=False).fit(X, y)
    assert [row["epoch"] for row in model.history_] == list(range(1, len(model.history_) + 1))
    checks = [(row["validation_error"], row["validation_loss"]) for row in model.history_]
    assert len(checks) < 60
    best = min(checks)  # the loss breaks ties
    assert checks.index(best) == len(checks) - 1 - 3
    _, held = hold_out(y, 0.2, 0)
    assert 1 - model.score(X[held], y[held]) == pytest.approx(best[0])
    chosen = (np.arange(len(held)), y[held])
    assert -np.log(model.predict_proba(X[held])[chosen]).mean() <= best[1] + 1e-5  # calibrated on these
    model.temperature_ = 1.0
    assert -np.log(model.predict_proba(X[held])[chosen]).mean() == pytest.approx(best[1], abs=1e-5)


def test_the_refit_is_a_training_on_all_series_for_the_best_number_of_epochs():
    X, y, _ = bumps(40)
    model, plain = (kq.SeriesClassifier(**SMALL, epochs=6, lr=5e-3, refit=refit).fit(X, y) for refit in (True, False))
    assert not np.array_equal(plain.predict_proba(X), model.predict_proba(X))
    assert plain.history_ == model.history_


def test_every_class_is_held_out_and_learned_from():
    y = np.array([0] * 50 + [1] * 2 + [2] + [3] * 5)
    learned, held = hold_out(y, 0.2, seed=4)
    assert sorted([*learned, *held]) == list(range(len(y)))
    assert np.bincount(y[held], minlength=4).tolist() == [10, 1, 0, 1]
    assert np.bincount(y[learned]).tolist() == [40, 1, 1, 4]
    assert len(hold_out(y, 0.0, seed=4)[1]) == 0


def test_probabilities_are_softened_where_the_validation_split_shows_them_too_sure():
    logits = torch.tensor([[9.0, 0.0]]).repeat(4, 1)
    data = Padded(torch.zeros(4, 1, 1), torch.ones(4, 1, dtype=torch.bool))
    samples = Labelled(data, torch.tensor([0, 0, 0, 1]), torch.ones(4))
    network = torch.nn.Module()
    network.forward = lambda values, real: logits
    # Three of four are right: the best temperature makes the probability 3/4, a logit of log 3.
    assert temperature_of(network, samples, 4) == pytest.approx(9 / np.log(3), rel=0.02)
    logits /= 100  # not sure enough: left as it is
    assert temperature_of(network, samples, 4) == 1


def test_augmentation_scales_adds_noise_and_cuts_ends():
    real = torch.arange(100)[None] < torch.tensor([[100], [50]]).repeat(200, 1)
    data = Padded(torch.ones(400, 100, 1).where(real.unsqueeze(-1), 0.0), real)
    samples = Labelled(data, torch.zeros(400).long(), torch.ones(400))
    values, kept = augmented(samples, 0.2, torch.Generator().manual_seed(0)).data
    assert not (kept & ~real).any()
    assert values[~kept].eq(0).all()
    share = kept.sum(1) / real.sum(1)
    assert 0.8 <= share.min() < 0.83
    assert share.mean() == pytest.approx(0.9, abs=0.02)  # two cuts of up to a tenth each
    means = values.squeeze(-1).sum(1) / kept.sum(1)
    assert means.std() == pytest.approx(0.2, rel=0.15)
    within = (values.squeeze(-1) - means.unsqueeze(1))[kept]
    assert within.std() == pytest.approx(0.2, rel=0.05)


def test_epochs_of_small_sets_are_several_passes():
    draw, every = epochs_of(lambda index: index, 10, 4, seed=0, least=12)
    assert every == 12
    batches = [draw(step, torch.Generator()) for step in range(every)]
    for first in range(0, every, 3):
        assert sorted(np.concatenate(batches[first : first + 3])) == list(range(10))
    assert epochs_of(lambda index: index, 200, 4, seed=0, least=12)[1] == 50


# Files


@pytest.mark.unchecked
def test_it_is_saved_with_the_parameters_of_the_fit(tmp_path):
    X, y, _ = bumps(8)
    given = {"width": np.int32(16), "eta": np.float32(0.5), "random_state": np.int64(3), "attention": np.str_("primal")}
    model = kq.SeriesClassifier(**{**SMALL, **given}, epochs=1).fit(X, np.array([b"a", b"\xff"])[y])
    kept, reading = model.get_params(), model.importance(X[:1])
    model.set_params(width=32, heads=4, rank=3, random_state=None)
    model.save(tmp_path / "model.safetensors")
    again = kq.SeriesClassifier.load(tmp_path / "model.safetensors", device="cpu")
    assert again.get_params() == kept
    assert again.classes_.dtype == model.classes_.dtype
    assert again.importance(X[:1]).to_json() == reading.to_json()


def test_columns_of_data_frames_are_checked_and_kept(tmp_path):
    X, y, _ = bumps(8)
    frames = [pd.DataFrame(values, columns=["heat", "wind"]) for values in X]
    model = kq.SeriesClassifier(**QUICK).fit(frames, y)
    model.save(tmp_path / "model.safetensors")
    for same in (model, kq.SeriesClassifier.load(tmp_path / "model.safetensors", device="cpu")):
        assert np.array_equal(same.predict(X), same.predict(frames))  # arrays have no names
        assert same.importance(frames[:1]).columns == ["heat", "wind"]
        with pytest.raises(ValueError, match=r"X has columns \['wind', 'heat'\], but .* fitted on \['heat', 'wind'\]"):
            same.predict([frame[["wind", "heat"]] for frame in frames])


def test_files_that_are_no_classifier_are_told(tmp_path, fitted):
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()["keyquery"]
    facts = json.loads(metadata)
    for changed, said in (
        ({"kind": "TableClassifier"}, "is not a saved SeriesClassifier"),
        ({"format": 9}, "has format 9; this version reads format 1"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"params": facts["params"] | {"depth": 10**9}}, "a network of depth 1000000000 has more than"),
        ({"params": facts["params"] | {"width": 2**24}}, "does not match a network with these parameters"),
        ({"params": facts["params"] | {"width": 0}}, "not a complete Series.* file: width must be at least 1"),
        ({"classes": {}}, "not a complete Series.* file: missing 'dtype'"),
        (None, "not a complete estimator file: it is nested more than 100 deep"),
    ):
        save_file(tensors, path, {"keyquery": "[" * 100_000 if changed is None else json.dumps(facts | changed)})
        with pytest.raises(ValueError, match=said):
            kq.SeriesClassifier.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        kq.SeriesClassifier.load(tmp_path / "none")


# Bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "primal++"}, "attention must be one of .*, got 'primal\\+\\+'; did you mean 'primal\\+'"),
        ({"width": 9}, "heads must divide width: 2 does not divide 9"),
        ({"rank": 5}, "rank must be at most 4"),
        ({"validation_fraction": 1.0}, "validation_fraction must be at least 0 and below 1, got 1.0"),
        ({"lr": NAN}, "lr must be finite"),
    ],
    ids=str,
)
def test_parameters_are_checked_at_fit(options, said):
    model = kq.SeriesClassifier(**{**QUICK, **options})  # as scikit-learn wants it, the constructor checks nothing
    with pytest.raises(ValueError, match=said):
        model.fit(GOOD, LABELS)
    with pytest.raises(ValueError, match="This SeriesClassifier instance is not fitted yet"):
        model.save("nowhere")


def test_bad_questions_are_told_and_a_fit_that_fails_leaves_the_last_one():
    wide = np.random.default_rng(0).normal(size=(5, 6, 2))
    model, two = kq.SeriesClassifier(**QUICK).fit(GOOD, LABELS), kq.SeriesClassifier(**QUICK).fit(wide, LABELS)
    assert model.score(GOOD, ["new"] * 5) == 0  # a class that was not there in training is merely never right
    expected = model.predict_proba(GOOD)
    for call, said in (
        (lambda: model.predict(wide), "X has 2 dims, but this SeriesClassifier was fitted on series of 1"),
        (lambda: two.predict(wide[0]), r"fitted on series of 2: pass a single series as \[X\]"),
        (lambda: model.score(GOOD, ["a", "b"]), "inconsistent numbers of samples"),
        (lambda: model.importance(GOOD, stretch=0), "stretch must be at least 1, got 0"),
        (lambda: model.predict_proba(GOOD * 1e30), r"X holds values too large: up to .* of the training data"),
        (lambda: model.predict_proba(GOOD * 1e300), r"X holds values too large: up to .* of the training data"),
        (lambda: model.fit(GOOD, ["a"] * 5), "y holds only one class, 'a': a classifier needs two or more"),
        (lambda: two.plot(wide), "plot takes one series"),
        (lambda: two.plot([wide[0]]), "plot takes one series"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert np.array_equal(model.predict_proba(GOOD), expected)
