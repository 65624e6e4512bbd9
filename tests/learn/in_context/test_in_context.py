"""InContextClassifier: against a float64 forward of its own equations, its limits, and what it reports."""

import pickle
import random
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import erf
from sklearn.base import clone
from sklearn.preprocessing import PowerTransformer
from sklearn.utils.estimator_checks import check_estimator

import keyquery as kq
from keyquery.learn.in_context.classifier import Preparation
from keyquery.learn.in_context.explanation import PARTS, score_parts
from keyquery.learn.in_context.network import read_network

COLUMNS, DIM, HIDDEN, DEPTH, CLASSES, HEADS = 8, 16, 24, 2, 4, 4


def weights_file(path, columns=COLUMNS, classes=CLASSES):
    """Random weights with the names and the fused projections of the release."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"encoder": (DIM, columns), "y_encoder": (DIM, 1), "decoder.0": (HIDDEN, DIM)}
    shapes["decoder.2"] = (classes, HIDDEN)
    for layer in range(DEPTH):
        name = f"transformer_encoder.layers.{layer}."
        shapes |= {name + "linear1": (HIDDEN, DIM), name + "linear2": (DIM, HIDDEN)}
        shapes[name + "self_attn.out_proj"] = (DIM, DIM)
    tensors = {"criterion.weight": torch.ones(classes)}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) / 4
    for layer in range(DEPTH):
        name = f"transformer_encoder.layers.{layer}."
        tensors[name + "self_attn.in_proj_weight"] = torch.randn(3 * DIM, DIM, generator=generator) / 2
        tensors[name + "self_attn.in_proj_bias"] = torch.randn(3 * DIM, generator=generator) / 4
        for norm in ("norm1", "norm2"):
            tensors[name + norm + ".weight"] = 1 + torch.randn(DIM, generator=generator) / 4
            tensors[name + norm + ".bias"] = torch.randn(DIM, generator=generator) / 4
    save_file(tensors, path)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    return path, weights_file(path)


def table(count, seed=0, columns=5, classes=3):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, columns)) * np.arange(1, columns + 1) + 3
    X[:, 1] = np.exp(X[:, 1] / 2)  # skewed: the power transform and the outliers matter
    return X, np.arange(count) % classes


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w, name, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x):
    return x * (1 + erf(x / 2**0.5)) / 2


def forward(w, context, labels, rows):
    """One sequence of context and other rows, with the mask written out."""
    n = len(context)
    x = linear(w, "encoder", np.concatenate((context, rows)))
    x[:n] += labels[:, None] @ w["y_encoder.weight"].T + w["y_encoder.bias"]
    mask = np.where(np.arange(len(x)) < n, 0.0, -np.inf)
    for layer in range(DEPTH):
        name = f"transformer_encoder.layers.{layer}."
        q, k, v = np.split(x @ w[name + "self_attn.in_proj_weight"].T + w[name + "self_attn.in_proj_bias"], 3, axis=1)
        heads = []
        for mine in np.split(np.arange(DIM), HEADS):
            scores = q[:, mine] @ k[:, mine].T / len(mine) ** 0.5 + mask
            scores = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(scores / scores.sum(1, keepdims=True) @ v[:, mine])
        x = norm(w, name + "norm1", x + linear(w, name + "self_attn.out_proj", np.concatenate(heads, 1)))
        x = norm(w, name + "norm2", x + linear(w, name + "linear2", gelu(linear(w, name + "linear1", x))))
    return linear(w, "decoder.2", gelu(linear(w, "decoder.0", x[n:])))


def prepared(X, rows, power):
    """Both tables by the statistics of the first, as the paper's appendix has it."""
    mean, std = np.nanmean(X, 0), np.nanstd(X, 0, ddof=1) + 1e-6
    both = np.clip((np.concatenate((X, rows)) - mean) / std, -100, 100)
    both = both[:, np.nanmax(X, 0) > np.nanmin(X, 0)]
    if power:
        both = (
            PowerTransformer().fit(both[: len(X)].astype(np.float32)).transform(both.astype(np.float32)).astype(float)
        )
    clean = both[: len(X)].copy()
    clean[np.abs(clean - np.nanmean(clean, 0)) > 4 * np.nanstd(clean, 0, ddof=1)] = np.nan
    mean, reach = np.nanmean(clean, 0), 4 * np.nanstd(clean, 0, ddof=1)
    both = np.maximum(-np.log(1 + np.abs(both)) + mean - reach, both)
    both = np.minimum(np.log(1 + np.abs(both)) + mean + reach, both)
    return np.nan_to_num(both * COLUMNS / both.shape[1])


def expected(w, X, y, rows, count, seed):
    """Logits of the ensemble, averaged."""
    classes = int(y.max()) + 1
    torch.manual_seed(seed)
    by_column, by_class = torch.randperm(X.shape[1]).tolist(), torch.randperm(classes).tolist()
    pairs = list(product(by_class, by_column))
    random.Random(0).shuffle(pairs)
    total = []
    for (shift, first), power in list(product(pairs, (False, True)))[:count]:
        both = prepared(X, rows, power)
        both = np.concatenate((both[:, first:], both[:, :first]), 1)
        both = np.pad(both, ((0, 0), (0, COLUMNS - both.shape[1])))
        logits = forward(w, both[: len(X)], (y + shift) % classes * 1.0, both[len(X) :])[:, :classes]
        total.append(np.roll(logits, -shift, axis=1) / 0.8)
    return np.mean(total, 0)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_it_equals_a_forward_in_float64(weights, count):
    path, w = weights
    X, y = table(40)
    rows, _ = table(9, seed=1)
    X[0, 1] = 1e4  # an outlier
    X[3, 2] = rows[2, 0] = np.nan
    X[:, 4] = 2.0  # constant: dropped
    model = kq.InContextClassifier(path, ensemble=count, random_state=5, device="cpu").fit(X, y)
    logits = expected(w, X, y, rows, count, 5)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    assert np.abs(model._logits(rows).numpy() - logits).max() < 1e-5 * np.abs(logits).max()
    assert np.allclose(model.predict_proba(rows), odds / odds.sum(1, keepdims=True), atol=1e-5)


def test_a_row_does_not_depend_on_the_others_and_is_the_same_when_cached(weights):
    X, y = table(30)
    rows, _ = table(6, seed=1)
    model = kq.InContextClassifier(weights[0], ensemble=4, random_state=0, device="cpu").fit(X, y)
    together = model.predict_proba(rows)
    assert np.allclose(together[2:3], model.predict_proba(rows[2:3]), atol=1e-6)
    assert np.allclose(together, clone(model).fit(X, y).predict_proba(rows), atol=1e-6)
    model.fit(X[:15], y[:15])
    assert np.abs(model.predict_proba(rows) - together).max() > 1e-3, "the cache outlived its context"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (table(1001), "1,001 rows, and this network supports at most 1,000"),
        (table(30, columns=9), "9 columns, and this network supports at most 8"),
        (table(30, classes=5), "5 classes, and this network supports at most 4"),
        (table(5, classes=1), "only one class"),
    ],
)
def test_limits_are_enforced(weights, data, said):
    with pytest.raises(ValueError, match=said):
        kq.InContextClassifier(weights[0], device="cpu").fit(*data)


def test_files_that_are_no_network_are_told(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        kq.InContextClassifier(path).fit(*table(9))
    path.write_bytes(b"12345678")
    with pytest.raises(ValueError, match="does not hold the network of TabPFN v1"):
        kq.InContextClassifier(path).fit(*table(9))
    save_file({"encoder.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(ValueError, match=r"missing 'decoder\.0\.weight'"):
        kq.InContextClassifier(path).fit(*table(9))


def test_frames_categories_and_missing_values(weights):
    X, y = table(30, columns=2)
    frame = pd.DataFrame(X, columns=["size", "weight"]).assign(colour=np.where(y == 1, "red", "blue"), flag=y == 0)
    coded = np.column_stack((X, y == 1, y == 0))
    frame.loc[4, "colour"] = None
    coded[4, 2] = np.nan
    models = [kq.InContextClassifier(weights[0], 3, random_state=0, device="cpu").fit(t, y) for t in (frame, coded)]
    assert np.allclose(models[0].predict_proba(frame), models[1].predict_proba(coded), atol=1e-6)
    with pytest.warns(UserWarning, match="not seen in training: 'green'"):
        models[0].predict(frame.assign(colour="green"))


def test_a_column_of_huge_offset_keeps_its_differences():
    table = np.array([[1.6e9 + i] for i in range(20)])
    assert np.allclose(np.diff(Preparation(table, power=False)(table, 1)[:, 0]), 1 / table.std(ddof=1), rtol=1e-5)


def test_it_is_saved_pickled_and_looked_at(weights, tmp_path):
    X, y = table(30)
    frame = pd.DataFrame(X, columns=list("abcde")).assign(e=np.where(y == 1, "red", "blue"))
    model = kq.InContextClassifier(weights[0], 3, random_state=0, device="cpu").fit(frame, np.array(["x", "y", "z"])[y])
    model.save(tmp_path / "model.safetensors")
    for again in (
        kq.InContextClassifier.load(tmp_path / "model.safetensors", device="cpu"),
        pickle.loads(pickle.dumps(model)),
    ):
        assert np.array_equal(again.predict_proba(frame), model.predict_proba(frame))
        assert again.classes_.tolist() == ["x", "y", "z"]
    assert len(kq.look(tmp_path / "model.safetensors").heads) == DEPTH * HEADS


def odds_of(logits, chosen):
    return logits[chosen] - np.log(np.exp(np.delete(logits, chosen)).sum())


def test_explanations_are_ablations(weights):
    path, w = weights
    X, y = table(12)
    row, _ = table(1, seed=3)
    model = kq.InContextClassifier(path, ensemble=4, random_state=0, device="cpu").fit(X, y)
    found = model.explain(row, rows=12)
    logits = expected(w, X, y, row, 4, 0)[0]
    chosen = int(logits.argmax())
    assert found.predicted == chosen
    assert found.probability == pytest.approx(model.predict_proba(row).max(), abs=1e-6)
    for place, column in enumerate(found.columns):
        masked = row.copy()
        masked[0, place] = np.nan
        drop = odds_of(logits, chosen) - odds_of(expected(w, X, y, masked, 4, 0)[0], chosen)
        assert column["effect"] == pytest.approx(drop, abs=1e-4)
    assert sum(one["attention"] for one in found.rows) == pytest.approx(1, abs=1e-6)
    assert max(abs(one["effect"]) for one in found.rows) > 1e-3
    for part in PARTS:
        assert sum(one[part] for one in found.rows) == pytest.approx(0, abs=1e-5)
    assert set(found.parts) == set(PARTS)
    assert len(found.records()) == 5 + 3 + 12
    assert kq.Reading.load(found.to_json()) == found
    assert model.explain(row, rows=1).rows[1]["effect"] is None
    with pytest.raises(ValueError, match="a table with one row"):
        model.explain(X)


def test_parts_sum_to_the_scores_and_swap_as_they_should(weights):
    layer = read_network(weights[0]).double().layers[0]
    context = torch.randn(2, 6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    memory = layer.attention.memory(context)
    symmetric, skew, popularity = score_parts(layer, context, context, memory)
    scores = layer.attention.queries(context) @ memory.key.mT * layer.attention.scale
    sums = symmetric + skew + popularity
    assert torch.allclose(sums - sums.mean(-1, keepdim=True), scores - scores.mean(-1, keepdim=True))
    assert torch.allclose(symmetric, symmetric.mT)
    assert torch.allclose(skew, -skew.mT)
    assert torch.allclose(popularity, popularity[:, :, :1])


def test_an_ablated_part_is_no_longer_in_the_scores(weights):
    """With every query the same for all rows, only popularity remains, and without it attention is uniform."""
    path, _ = weights
    X, y = table(12)
    model = kq.InContextClassifier(path, ensemble=2, random_state=0, device="cpu").fit(X, y)
    for layer in model.network_.layers:
        layer.attention.query.weight.data.zero_()
    found = model.explain(X[:1], rows=0)
    assert found.parts["symmetric"] == pytest.approx(0, abs=1e-5)
    assert found.parts["skew"] == pytest.approx(0, abs=1e-5)
    before = model._logits(X[:1])[0].numpy()
    for layer in model.network_.layers:
        layer.attention.query.bias.data.zero_()
    model.network_ = pickle.loads(pickle.dumps(model.network_))  # another object: nothing is cached
    assert found.parts["popularity"] != 0
    assert np.abs(model._logits(X[:1])[0].numpy() - before).max() > 1e-4


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_it_passes_the_checks_of_scikit_learn(tmp_path):
    weights_file(tmp_path / "wide.safetensors", columns=100, classes=10)
    model = kq.InContextClassifier(tmp_path / "wide.safetensors", ensemble=2, random_state=0, device="cpu")
    expected_failures = {
        "check_classifiers_train": "the weights are random here, so that it classifies at random",
        "check_methods_subset_invariance": "it wants 1e-7, and the network computes in float32",
    }
    results = check_estimator(model, on_fail=None, expected_failed_checks=expected_failures)
    assert [(one["check_name"], one["exception"]) for one in results if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in results) > 40
