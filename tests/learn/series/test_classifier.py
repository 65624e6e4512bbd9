"""SeriesClassifier: what it learns, what it ignores, and what it says of bad input."""

import json
import math
import struct

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load, save

import keyquery as kq
from keyquery.learn.base import hold_out
from keyquery.learn.inputs.sequences import Padded, padded, series_of, statistics
from keyquery.learn.series.network import BINS, SeriesNetwork, stretches
from keyquery.learn.series.training import Labelled, augmented, epochs_of

SMALL = {"width": 16, "heads": 2, "depth": 1, "device": "cpu", "random_state": 0}
NAN = float("nan")


def bumps(count, seed=0, least=24, most=40):
    """Series of two dims and many lengths: class 1 has a bump in its second dim, class 0 a dip, at any place."""
    rng = np.random.default_rng(seed)
    found, labels, at = [], np.arange(count) % 2, []
    for label in labels:
        one = rng.normal(size=(rng.integers(least, most), 2)) / 4
        at.append(rng.integers(0, len(one) - 7))
        one[at[-1] : at[-1] + 7, 1] += (2 * label - 1) * 3 * np.hanning(7)
        found.append(one * [10, 0.1] + [100, -3])
    return found, labels, at


@pytest.fixture(scope="module")
def fitted():
    X, y, _ = bumps(80)
    return kq.SeriesClassifier(**SMALL, epochs=15, lr=5e-3).fit(X, y)


def test_it_learns_what_stands_at_any_place(fitted):
    X, y, _ = bumps(60, seed=1)
    assert fitted.score(X, y) > 0.9
    found = fitted.predict_proba(X)
    assert found.shape == (60, 2)
    assert np.allclose(found.sum(1), 1)
    assert np.array_equal(fitted.classes_[found.argmax(1)], fitted.predict(X))


@pytest.mark.parametrize("attention", ["primal+", pytest.param("primal", marks=pytest.mark.slow), "rbf"])
def test_every_attention_learns(attention):
    X, y, _ = bumps(60, least=16, most=17)
    model = kq.SeriesClassifier(**{**SMALL, "depth": 2}, attention=attention, epochs=15, lr=5e-3).fit(X, y)
    assert model.score(X, y) > 0.9
    layers = [type(block.attention).__name__ for block in model.network_.encoder.blocks]
    primal = {"primal": 2, "primal+": 1}.get(attention, 0)
    assert layers == ["Attention"] * (2 - primal) + ["PrimalAttention"] * primal


def test_all_kinds_of_input_mean_the_same(fitted):
    X, _, _ = bumps(6, seed=2)
    wide = np.full((6, max(map(len, X)) + 5, 2), NAN)
    for number, one in enumerate(X):
        wide[number, : len(one)] = one
    expected = fitted.predict_proba(X)
    assert np.allclose(fitted.predict_proba(wide), expected, atol=1e-6)
    assert np.allclose(fitted.predict_proba(torch.from_numpy(wide)), expected, atol=1e-6)
    assert np.allclose(fitted.predict_proba([one.tolist() for one in X]), expected, atol=1e-6)
    assert np.allclose(fitted.predict_proba(kq.data.series.Series(tuple(X), None, ())), expected, atol=1e-6)
    assert np.allclose(fitted.predict_proba(X[3:4]), expected[3:4], atol=1e-6)  # its batch does not matter


def test_a_file_is_fitted_as_it_is_read(tmp_path):
    rows = [f"{i},{i + 1},{i + 2}:{'up' if i % 2 else 'down'}" for i in range(8)]
    path = tmp_path / "waves.ts"
    path.write_text("@univariate true\n@classLabel true up down\n@data\n" + "\n".join(rows))
    series = kq.data.load_ts(path)
    model = kq.SeriesClassifier(**SMALL, epochs=1).fit(series)
    assert model.classes_.tolist() == ["down", "up"]
    assert model.score(series) == model.score(series.values, series.labels)


@pytest.mark.parametrize(("attention", "tokens"), [("primal", "plain"), ("general", "multiscale")])
def test_padding_and_missing_tokens_reach_nothing(attention, tokens):
    network = SeriesNetwork(2, 3, 16, 2, 2, attention, rank=4, tokens=tokens).eval()
    values, real = torch.randn(4, 20, 2), torch.ones(4, 20, dtype=torch.bool)
    real[:, 13:], real[1, 4:6] = False, False
    first = network(values, real)
    values[~real] = NAN
    assert torch.equal(network(values, real), first)
    assert torch.allclose(network(values[:, :13], real[:, :13]), first, atol=1e-5)
    cross = torch.nn.functional.cross_entropy(network(values, real), torch.tensor([0, 1, 2, 0]))
    cross.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in network.parameters())


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
def test_stretches_are_those_of_adaptive_pooling(length):
    x, real = torch.randn(1, length + 3, 4), torch.zeros(1, length + 3, dtype=torch.bool)
    real[:, 1 : length + 1] = True
    expected = torch.nn.functional.adaptive_avg_pool1d(x[:, 1 : length + 1].mT, BINS).mT
    assert torch.allclose(stretches(real, BINS) @ x, expected, atol=1e-6)


def test_values_are_standardised_by_what_is_there():
    series = series_of([np.array([[1.0, NAN], [NAN, NAN], [3.0, 7.0]]), np.array([[5.0, 7.0]])])
    mean, scale = statistics(series)
    assert mean.tolist() == [3.0, 7.0]
    assert np.allclose(scale, [math.sqrt(8 / 3), 1.0])  # what does not vary is left as it is
    values, real = padded(series, mean, scale)
    assert real.tolist() == [[True, False, True], [True, False, False]]
    gaps = torch.tensor([[False, True], [True, True], [False, False]])
    assert (values[0][gaps] == 0).all()
    assert torch.allclose(values[0, :, 0], torch.tensor([-2.0, 0.0, 0.0]) / math.sqrt(8 / 3))


def test_the_same_seed_gives_the_same_and_leaves_torch_as_it_was():
    X, y, _ = bumps(20)
    state = torch.get_rng_state()
    first, again, other = (
        kq.SeriesClassifier(**{**SMALL, "random_state": seed}, epochs=2).fit(X, y).predict_proba(X)
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_long_series_beside_short_ones_is_not_their_length(fitted):
    X, _, _ = bumps(6, seed=2)
    X.insert(2, np.tile(X[0], (30, 1)))
    expected = np.concatenate([fitted.predict_proba([one]) for one in X])
    shapes = []
    hook = fitted.network_.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    found = fitted.predict_proba(X)
    hook.remove()
    assert np.allclose(found, expected, atol=1e-6)
    assert max(length for count, length in shapes if count > 1) < 64


def test_masked_and_missing_values_are_gaps(fitted):
    X, _, _ = bumps(1, seed=2)
    gaps = X[0].copy()
    gaps[3, 1] = gaps[5] = NAN
    expected = fitted.predict_proba([gaps])
    masked = np.ma.masked_array(np.where(np.isnan(gaps), 1e6, gaps), np.isnan(gaps))
    assert np.array_equal(fitted.predict_proba([masked]), expected)
    assert np.array_equal(fitted.predict_proba(masked[None]), expected)
    frame = pd.DataFrame(gaps).astype("Float64")
    assert frame.isna().sum().sum() == 3
    assert np.array_equal(fitted.predict_proba([frame]), expected)


def test_tensors_of_short_floats_are_series(fitted):
    X, _, _ = bumps(3, seed=2)
    short = [torch.from_numpy(one).bfloat16() for one in X]
    assert np.array_equal(fitted.predict_proba(short), fitted.predict_proba([one.double() for one in short]))


def test_columns_of_data_frames_are_checked_and_kept(tmp_path):
    X, y, _ = bumps(8)
    frames = [pd.DataFrame(one, columns=["heat", "wind"]) for one in X]
    model = kq.SeriesClassifier(**SMALL, epochs=1).fit(frames, y)
    model.save(tmp_path / "model.safetensors")
    for one in (model, kq.SeriesClassifier.load(tmp_path / "model.safetensors", device="cpu")):
        assert np.array_equal(one.predict(X), one.predict(frames))  # arrays have no names
        assert one.importance(frames[:1]).columns == ["heat", "wind"]
        with pytest.raises(ValueError, match=r"X has columns \['wind', 'heat'\], but .* fitted on \['heat', 'wind'\]"):
            one.predict([frame[["wind", "heat"]] for frame in frames])
    with pytest.raises(ValueError, match=r"the columns of the first, .*; series 1 has"):
        model.fit([frames[0], frames[1][["wind", "heat"]]], [0, 1])


def test_training_stops_early_and_keeps_the_best_epoch():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 10)), np.arange(40) % 2  # nothing to learn
    model = kq.SeriesClassifier(**SMALL, epochs=60, patience=3, lr=5e-3, refit=False).fit(X, y)
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


def test_every_class_is_held_out_and_learned_from():
    y = np.array([0] * 50 + [1] * 2 + [2] + [3] * 5)
    learned, held = hold_out(y, 0.2, seed=4)
    assert sorted([*learned, *held]) == list(range(len(y)))
    assert np.bincount(y[held], minlength=4).tolist() == [10, 1, 0, 1]
    assert np.bincount(y[learned]).tolist() == [40, 1, 1, 4]
    assert len(hold_out(y, 0.0, seed=4)[1]) == 0


def test_series_of_one_token_and_longer_ones_than_any_in_training(fitted):
    assert fitted.predict([[[100.0, -3.0]], np.tile([100.0, -3.0], (400, 1))]).shape == (2,)
    X = np.array([[-1.0], [1.0]] * 10)
    model = kq.SeriesClassifier(**SMALL, epochs=20, lr=0.02).fit(X, np.sign(X[:, 0]))
    assert model.score(X, np.sign(X[:, 0])) == 1


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["é", "b"]),
        np.array([3, -1], dtype=np.int8),
        np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]"),
        np.array([b"\xff", b"a"]),
    ],
    ids=str,
)
def test_it_is_saved_with_labels_of_any_kind(tmp_path, labels):
    X, y, _ = bumps(8)
    model = kq.SeriesClassifier(**SMALL, epochs=1).fit(X, labels[y])
    model.save(tmp_path / "model.safetensors")
    again = kq.SeriesClassifier.load(tmp_path / "model.safetensors", device="cpu")
    assert again.get_params() == model.get_params()
    assert again.classes_.dtype == model.classes_.dtype
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.history_ == model.history_
    assert again.importance(X[:1]).to_json() == model.importance(X[:1]).to_json()


@pytest.mark.unchecked
def test_it_is_saved_with_the_parameters_of_the_fit(tmp_path):
    X, y, _ = bumps(8)
    given = {"width": np.int32(16), "eta": np.float32(0.5), "random_state": np.int64(3), "attention": np.str_("primal")}
    model = kq.SeriesClassifier(**{**SMALL, **given}, epochs=1).fit(X, y)
    kept = {**model.get_params(), "device": "auto"}
    expected = model.predict_proba(X)
    said = model.importance(X[:1]).provenance["estimator"]
    model.set_params(width=32, heads=4, rank=3, random_state=None)
    model.save(tmp_path / "model.safetensors")
    again = kq.SeriesClassifier.load(tmp_path / "model.safetensors")
    assert again.get_params() == kept
    assert again.random_state == 3
    assert np.allclose(again.predict_proba(X), expected, atol=1e-6)
    assert model.importance(X[:1]).provenance["estimator"] == said


def test_files_that_are_no_classifier_are_told(tmp_path, fitted):
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    head = json.loads(whole[8 : 8 + size])

    def write(change):
        facts = json.loads(head["__metadata__"]["keyquery"])
        change(facts)
        text = json.dumps({**head, "__metadata__": {"keyquery": json.dumps(facts)}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])

    cases = [
        (lambda facts: facts.update(kind="TableClassifier"), "is not a saved SeriesClassifier"),
        (lambda facts: facts.update(format=9), "has format 9; this version reads format 1"),
        (lambda facts: facts["params"].update(depth=10**9), "a network of depth 1000000000 has more than"),
        (lambda facts: facts["params"].update(width=2**24), "does not match a network with these parameters"),
        (lambda facts: facts["params"].update(width=0), "not a complete Series.* file: width must be at least 1"),
        (lambda facts: facts["classes"].update(dtype="|O"), "labels cannot be of dtype object"),
        (lambda facts: facts["classes"].update(labels=[1, 1]), "labels must be one or more, in rising order"),
        (lambda facts: facts.pop("classes"), "not a complete Series.* file: missing 'classes'"),
    ]
    for change, said in cases:
        write(change)
        with pytest.raises(ValueError, match=said):
            kq.SeriesClassifier.load(path)
    text = json.dumps({**head, "__metadata__": {"keyquery": "[" * 100_000}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    with pytest.raises(ValueError, match="not a complete estimator file: it is nested more than 100 deep"):
        kq.SeriesClassifier.load(path)
    for wrong, said in (
        (NAN, "mean or scale holds NaN or infinity"),
        (0.0, "mean and scale must be .*, and scale above 0"),
    ):
        tensors = load(whole)
        tensors["scale"][0] = wrong
        path.write_bytes(save(tensors, head["__metadata__"]))
        with pytest.raises(ValueError, match=said):
            kq.SeriesClassifier.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        kq.SeriesClassifier.load(tmp_path / "none")


def test_the_refit_is_a_training_on_all_series_for_the_best_number_of_epochs():
    X, y, *_ = bumps(40)
    model = kq.SeriesClassifier(**SMALL, epochs=6, lr=5e-3).fit(X, y)
    plain = kq.SeriesClassifier(**SMALL, epochs=6, lr=5e-3, refit=False).fit(X, y)
    assert not np.array_equal(plain.predict_proba(X), model.predict_proba(X))
    assert plain.history_ == model.history_


def test_weights_of_series_and_classes():
    X, y, *_ = bumps(24)
    kept = np.ones(len(y))
    kept[::5] = 0
    options = {**SMALL, "epochs": 2}
    weighted = kq.SeriesClassifier(**options).fit(X, y, sample_weight=kept)
    chosen = np.flatnonzero(kept)
    left_out = kq.SeriesClassifier(**options).fit([X[index] for index in chosen], np.asarray(y)[chosen])
    assert np.array_equal(weighted.predict_proba(X), left_out.predict_proba(X))
    label = np.unique(y)[1]
    heavy = kq.SeriesClassifier(**options, lr=1e-2, class_weight={label: 50}).fit(X, y)
    assert heavy.predict_proba(X)[:, 1].mean() > weighted.predict_proba(X)[:, 1].mean()


def test_augmentation_scales_adds_noise_and_cuts_ends():
    real = torch.arange(100)[None] < torch.tensor([[100], [50]]).repeat(200, 1)
    samples = Labelled(
        Padded(torch.ones(400, 100, 1).where(real.unsqueeze(-1), 0.0), real), torch.zeros(400).long(), torch.ones(400)
    )
    changed = augmented(samples, 0.2, torch.Generator().manual_seed(0))
    values, kept = changed.data
    assert not (kept & ~real).any()
    assert values[~kept].eq(0).all()
    share = kept.sum(1) / real.sum(1)
    assert 0.8 <= share.min() < 0.83
    assert share.mean() == pytest.approx(0.9, abs=0.02)  # two cuts of up to a tenth each
    means = values.squeeze(-1).sum(1) / kept.sum(1)
    assert means.std() == pytest.approx(0.2, rel=0.15)
    within = (values.squeeze(-1) - means.unsqueeze(1))[kept]
    assert within.std() == pytest.approx(0.2, rel=0.05)
    X, y, *_ = bumps(24)
    plain, noisy = (kq.SeriesClassifier(**SMALL, epochs=2, augment=strength).fit(X, y) for strength in (0, 0.1))
    assert not np.array_equal(plain.predict_proba(X), noisy.predict_proba(X))


def test_epochs_of_small_sets_are_several_passes():
    draw, every = epochs_of(lambda index: index, 10, 4, seed=0, least=12)
    assert every == 12
    batches = [draw(step, torch.Generator()) for step in range(every)]
    for first in range(0, every, 3):
        assert sorted(np.concatenate(batches[first : first + 3])) == list(range(10))
    assert epochs_of(lambda index: index, 200, 4, seed=0, least=12)[1] == 50
