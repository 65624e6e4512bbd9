"""ConvolutionRidgeClassifier: its features, its closed form, series of any kind, and files."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.linear_model import Ridge

import keyquery as kq
from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.series import features as series_features
from keyquery.learn.series.features import (
    KERNELS,
    Competing,
    Convolutions,
    convolved,
    weights,
    windows_inside,
)
from keyquery.learn.series.ridge_classifier import fit_ridge, interpolated


def waves(count, length=40, seed=0):
    """Sines and square waves of random phase, in noise."""
    rng = np.random.default_rng(seed)
    phase = rng.uniform(0, 2 * np.pi, (2 * count, 1))
    sines = np.sin(np.linspace(0, 12, length) + phase)
    y = np.repeat(["sine", "square"], count)
    return np.where((y == "square")[:, None], np.sign(sines), sines) + rng.normal(size=sines.shape) / 5, y


def small(**options):
    return kq.ConvolutionRidgeClassifier(**{"features": 672, "random_state": 0, "device": "cpu"} | options)


def full(values):
    return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))


def plain_features(summed, kernel, half, thresholds, levels):
    """Share and mean above each threshold, and sustained values, of numpy's convolution."""
    flipped = KERNELS[kernel].double().numpy()[::-1]  # numpy's convolution flips the kernel
    values = np.convolve(summed, flipped, "valid" if half else "same")
    pools = []
    for threshold in thresholds:
        above = values[values > threshold]
        pools += [len(above) / len(values), above.mean() if len(above) else 0.0]
    for level in range(levels if half else 0):
        size = max(4**each for each in range(level + 1) if 4**each <= len(values))
        pools.append(max(values[first : first + size].min() for first in range(len(values) - size + 1)))
    return pools


def test_features_are_those_of_plain_convolutions():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(3, 40, 2))).float()
    module = Convolutions.fitted(full(values), 4, rng)
    module.thresholds[0].data += 1e-3  # off the values that they are quantiles of
    dilation, count = module.plans[0][0]
    assert (dilation, module.levels) == (1, 3)
    features, column = module(full(values)), 0
    assert features.shape == (3, module.width)
    for half in (0, 1):
        width = 2 * count + half * module.levels
        block = features[:, column : column + 42 * width].view(3, width, 42)
        column += 42 * width
        for kernel in range(half, 84, 2):
            thresholds = module.thresholds[0][kernel].tolist()
            for series, computed in zip(values, block[:, :, kernel // 2], strict=True):
                summed = (series * module.dims[0][kernel]).sum(-1).double().numpy()
                expected = plain_features(summed, kernel, half, thresholds, module.levels)
                assert computed.tolist() == pytest.approx(expected, abs=2e-5)


def test_dilated_windows():
    values = torch.arange(20.0)[None, :, None]
    kernels = weights(torch.ones(84, 1))
    inner = convolved(values, kernels, 2)[:, 8:12, 0]  # windows inside: a ramp, kernels of sum 0
    slopes = KERNELS @ (2.0 * torch.arange(-4, 5))
    assert torch.equal(inner, slopes[:, None].expand(-1, 4))
    real = torch.arange(20)[None] < torch.tensor([[20], [16], [3]])
    inside = windows_inside(real, 2)
    assert inside.sum(1).tolist() == [4, 16, 3]  # 16 steps hold no window of 17, and are all counted


def test_competing_kernels_score_as_in_a_plain_loop():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(2, 30, 1))).float()
    module = Competing.fitted(full(values), rng)
    assert list(module.dilations) == [1, 2]
    kernels = module.weight[1].double().numpy()  # (8, 32, 9): dilation 2 of the series
    assert np.abs(kernels.sum(-1)).max() < 1e-6
    features = module(full(values)).double().numpy()
    for series in range(2):
        padded = np.pad(values[series, :, 0].double().numpy(), 8)
        windows = np.stack([padded[time : time + 17 : 2] for time in range(30)])
        convolutions = kernels @ windows.T  # (8, 32, 30)
        strength, counts = np.zeros((8, 32)), np.zeros((8, 32))
        for group in range(32):
            for time in range(30):
                column = convolutions[:, group, time]
                strength[column.argmax(), group] += column.max() / 30
                counts[column.argmin(), group] += 1 / 30
        block = features[series, 512:1024].reshape(4, 2, 8, 8)  # chunks of groups; strength, counts; kernel; group
        assert block[:, 0].transpose(1, 0, 2).reshape(8, 32) == pytest.approx(np.sqrt(strength), abs=1e-5)
        assert block[:, 1].transpose(1, 0, 2).reshape(8, 32) == pytest.approx(np.sqrt(counts), abs=1e-5)
    differences = module(full(torch.full((1, 30, 1), 0.7)))[
        :, module.width // 2 :
    ]  # all win where a series is constant
    assert differences.view(-1, 2, 64)[:, 1].eq(1).all()


def test_leave_one_out_is_that_of_refitted_regressions():
    rng = np.random.default_rng(0)
    features, target = torch.from_numpy(rng.normal(size=(14, 30))), torch.from_numpy(np.arange(14) % 3)
    weight = torch.from_numpy(rng.uniform(0.5, 2, 14))
    fitted = fit_ridge(features, target, weight)
    share = (weight / weight.sum()).numpy()
    X = features.numpy()
    mean = share @ X
    Z = (X - mean) / X.std(0) / np.sqrt(30)
    Y = 2 * np.eye(3)[target] - 1
    losses = 0.0
    for out in range(14):
        kept = np.delete(np.arange(14), out)
        model = Ridge(alpha=fitted.penalty).fit(Z[kept], Y[kept], sample_weight=weight.numpy()[kept])
        scores = model.predict(Z[out : out + 1])[0] / fitted.temperature
        losses += share[out] * (np.logaddexp.reduce(scores) - 15 / 16 * scores[target[out]] - scores.mean() / 16)
    assert fitted.loss == pytest.approx(losses, rel=1e-6)
    whole = Ridge(alpha=fitted.penalty).fit(Z, Y, sample_weight=weight.numpy())
    assert np.allclose(features.numpy() @ fitted.weight.numpy() + fitted.bias.numpy(), whole.predict(Z), atol=1e-8)


def test_classes_of_one_series_do_not_choose_the_penalty():
    X, y = waves(10)
    model = small().fit(X, np.arange(20))
    assert model.loss_ is None
    assert model.score(X, np.arange(20)) == 1
    assert model.predict_proba(X).max(1).mean() > 0.5
    plain, one_more = small().fit(X, y), small().fit(np.r_[X, 9 * X[:1] ** 2], np.r_[y, ["other"]])
    assert one_more.temperature_ == pytest.approx(plain.temperature_, rel=0.5)


def test_more_samples_than_features_give_the_same_as_the_dual():
    rng = np.random.default_rng(1)
    features, target = torch.from_numpy(rng.normal(size=(40, 6))), torch.from_numpy(np.arange(40) % 2)
    few = fit_ridge(features, target, torch.ones(40, dtype=torch.float64))
    copies = fit_ridge(features.repeat(1, 10), target, torch.ones(40, dtype=torch.float64))  # 60 features: the dual
    assert few.loss == pytest.approx(copies.loss, rel=1e-6)
    assert torch.allclose(features @ few.weight + few.bias, features.repeat(1, 10) @ copies.weight + copies.bias)


def test_it_separates_waves_of_any_phase_and_its_probabilities_are_calibrated():
    X, y = waves(40)
    unseen, truth = waves(100, seed=1)
    model = small().fit(X, y)
    probabilities = model.predict_proba(unseen)
    assert model.score(unseen, truth) > 0.9
    assert np.allclose(probabilities.sum(1), 1)
    assert abs(probabilities.max(1).mean() - (model.predict(unseen) == truth).mean()) < 0.1


def test_files_that_no_fit_wrote_are_told(tmp_path):
    path = tmp_path / "model.safetensors"
    small().fit(*waves(4)).save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["keyquery"])
    for change, said in (
        ({"plans": [[[1, 4]]]}, "the dilations do not match the tensors"),
        ({"levels": 9}, "does not match a network"),
        ({"dilations": [0, 2, 4]}, "dilation must be between 1 and"),
        ({"penalty": "x"}, "penalty must be a number"),
    ):
        save_file(tensors, path, {"keyquery": json.dumps(facts | change)})
        with pytest.raises(ValueError, match=f"not a complete ConvolutionRidgeClassifier file: .*{said}"):
            kq.ConvolutionRidgeClassifier.load(path)


def test_padding_and_the_batch_do_not_matter(monkeypatch):
    X, y = waves(10)
    series = [one[: 20 + index] for index, one in enumerate(X)]
    model = small().fit(series, y)
    expected = model.predict_proba(series)
    longer = np.full((20, 60), np.nan)
    for row, one in zip(longer, series, strict=True):
        row[: len(one)] = one
    assert np.allclose(model.predict_proba(longer), expected, atol=1e-12)
    assert np.allclose(model.predict_proba(series[:1]), expected[:1], atol=1e-9)
    monkeypatch.setattr(series_features, "TOGETHER", 1)
    monkeypatch.setattr(series_features, "SERIES", 1)
    assert np.allclose(model.predict_proba(series), expected, atol=1e-9)


def test_gaps_are_interpolated():
    values = np.array([[np.nan, 1.0], [2.0, np.nan], [np.nan, np.nan], [4.0, 7.0], [np.nan, np.nan]])
    assert interpolated(values).tolist() == [[2, 1], [2, 3], [3, 5], [4, 7]]
    X, y = waves(10)
    ramp = np.linspace(0, 1, 40) + X * 0
    model = small().fit(X, y)
    holed = ramp.copy()
    holed[:, 10:15] = np.nan
    assert np.allclose(model.predict_proba(holed), model.predict_proba(ramp), atol=1e-6)
    empty = np.stack((X, np.full_like(X, np.nan)), -1)  # a dim without values, in some series
    empty[:3, :, 1] = 1.0
    assert np.isfinite(small().fit(empty, y).predict_proba(empty)).all()


def test_bad_parameters():
    for options in ({"features": 0}, {"class_weight": "all"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            small(**options).fit(*waves(4))
