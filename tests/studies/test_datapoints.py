"""The study of cross-row attention: its folds, what a protocol shows, and its baselines."""

import lzma

import numpy as np
import pytest
import torch
from keyquery_studies import datapoints as module
from keyquery_studies.datapoints import MODELS, PROTOCOLS, fitted, fold_of, metrics_of, samples_of

from keyquery.learn.npt.training import Plan

selection = pytest.importorskip("sklearn.model_selection")


@pytest.fixture(scope="module")
def sheets(tmp_path_factory):
    """Yacht as its file is, with other numbers: the target is of the last feature and of a category."""
    folder, rng = tmp_path_factory.mktemp("sheets"), np.random.default_rng(0)
    codes, x = rng.integers(0, 3, (80, 5)), rng.normal(size=80)
    codes[7, 1] = 9  # in one row only
    rows = np.column_stack((codes, x, 10 * x + 5 * codes[:, 0]))
    text = "".join(" ".join(f"{value:.4f}" for value in row) + "\n" for row in rows)
    (folder / "uci_yacht_data.txt.xz").write_bytes(lzma.compress(text.encode()))
    return folder


def test_folds_are_the_published_ones(sheets):
    tested = [fold_of("yacht", str(sheets), number).rows[2] for number in range(10)]
    assert sorted(np.concatenate(tested)) == list(range(80))
    [(rest, first), *_] = selection.KFold(10, shuffle=True, random_state=42).split(np.zeros(80))
    fold = fold_of("yacht", str(sheets), 0)
    learned, held = selection.train_test_split(rest, test_size=0.2 / 0.9, random_state=42)
    for rows, expected in zip(fold.rows, (learned, held, first), strict=True):
        assert np.array_equal(rows, np.sort(expected))
    breast = fold_of("breast", None, 3)
    assert [len(rows) for rows in breast.rows] == [398, 114, 57]
    assert np.mean(breast.y[breast.rows[2]]) == pytest.approx(np.mean(breast.y), abs=0.01)  # stratified
    with pytest.raises(ValueError, match=r"needs uci_boston_data\.txt in the folder of data"):
        fold_of("boston", None, 0)


def test_a_protocol_encodes_by_the_rows_it_knows(sheets):
    number = next(n for n in range(10) if 7 in fold_of("yacht", str(sheets), n).rows[2])
    fold = fold_of("yacht", str(sheets), number)
    for protocol in PROTOCOLS:
        samples, sizes = samples_of(fold, protocol)
        published = protocol == "published"
        known = np.arange(80) if published else np.concatenate(fold.rows[:2])
        assert samples.rows.values[known, 5].mean().abs() < 1e-6
        assert samples.rows.values[fold.rows[0], -1].mean().abs() < 1e-6  # the target, by training rows
        assert sizes == [3, 3 + published, 3, 3, 3, 0, 0]
        assert bool(samples.rows.hidden[7, 1]) is not published  # a category that only a test row has
        assert set(samples.bare) == (set(np.concatenate(fold.rows[1:])) if published else set())


def test_metrics_are_in_the_units_of_the_target(sheets):
    fold = fold_of("yacht", str(sheets), 0)
    mean, scale = fold.unit
    exact = ((fold.y[fold.rows[2]] - mean) / scale)[:, None]
    assert metrics_of(exact, fold, 2)["rmse"] == pytest.approx(0, abs=1e-9)
    assert metrics_of(exact + 1, fold, 2)["rmse"] == pytest.approx(scale)
    breast = fold_of("breast", None, 0)
    truth = breast.y[breast.rows[2]].astype(int)
    metrics = metrics_of(np.log(np.where(np.eye(2)[truth], 0.9, 0.1)), breast, 2)
    assert metrics == {"accuracy": 1.0, "nll": pytest.approx(-np.log(0.9))}


def test_published_predictions_see_no_target_and_inductive_ones_no_test_row(sheets):
    """Changing targets, or other test rows, changes a prediction only where the protocol shows them."""
    fold = fold_of("yacht", str(sheets), 0)
    test, sees = fold.rows[2], {}
    for protocol in PROTOCOLS:
        samples, sizes = samples_of(fold, protocol)
        torch.manual_seed(0)
        network = module.TableNetwork(sizes, 8, 2, 2, published=protocol == "published").eval()
        for weight in network.parameters():
            weight.data += 0.1 * torch.randn(weight.shape)
        plan = Plan(published=True, target_share=1.0) if protocol == "published" else Plan()
        before = module.predicted(network, samples, plan, test[:1])
        for what, rows, column in (("targets", fold.rows[0], -1), ("test rows", test[1:], 5)):
            changed = samples.rows.values.clone()
            changed[rows, column] += 1
            other = module.Samples(samples.rows._replace(values=changed), *fold.rows[:2], samples.bare)
            sees[protocol, what] = not torch.allclose(before, module.predicted(network, other, plan, test[:1]))
    assert sees == {
        ("published", "targets"): False,
        ("published", "test rows"): True,
        ("inductive", "targets"): True,
        ("inductive", "test rows"): False,
    }


def test_nearest_neighbours_are_those_of_brute_force(sheets):
    fold = fold_of("yacht", str(sheets), 0)
    (held, _), *_ = fitted("neighbours", fold)  # one neighbour
    learned = fold.rows[0]
    hot = np.concatenate([fold.x[:, [c]] == np.unique(fold.x[learned, c]) for c in range(5)], 1).astype(float)
    number = (fold.x[:, 5] - fold.x[learned, 5].mean()) / fold.x[learned, 5].std()
    features = np.column_stack((hot, number))
    nearest = np.square(features[fold.rows[1], None] - features[learned]).sum(-1).argmin(1)
    mean, scale = fold.unit
    assert np.allclose(scale * held[:, 0] + mean, fold.y[learned][nearest])


@pytest.mark.slow
def test_the_study_runs_both_protocols_and_all_baselines(study, sheets):
    options = ["--table", "yacht", "--fold", 0, "--fold", 1, "--steps", 3, "--embedding", 8]
    reading = study("datapoints", "--data", sheets, *options)
    assert {(row["part"], row["model"], row["folds"]) for row in reading.summary()} == {
        *(("npt", protocol, 2) for protocol in PROTOCOLS),
        *(("baselines", model, 2) for model in MODELS),
    }
    assert len(reading.contrasts()) == 7
