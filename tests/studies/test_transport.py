"""The study of transport: its data, its rivals, its courses, and what is made of them."""

import io
import lzma
import math

import numpy as np
import pytest
import torch
from keyquery_studies.transport.baselines import METHODS, Transformer, learn, recipe_of
from keyquery_studies.transport.cost import costing
from keyquery_studies.transport.datasets import MEANS, bayes, keep_adult, named, simulated, split_of
from keyquery_studies.transport.study import MethodTrial, TransportStudy, methods_of
from keyquery_studies.transport.study import run as run_transport
from keyquery_studies.transport.trajectories import CourseTrial, StartTrial, Task
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.pages import terminal

pytestmark = pytest.mark.slow  # it trains


def test_simulated_classes_are_those_that_were_published():
    for classes, i in ((2, 3), (3, 2)):
        x, y = simulated(classes, i, 20, 3000, seed=0)
        means = np.array([x[y == place].mean((0, 1)) for place in range(classes)])
        assert np.allclose(means, i * np.array(MEANS[classes]), atol=0.05)
        inner = (x - means[y][:, None]).reshape(-1, 2)
        assert np.allclose(np.cov(inner.T), 2 * np.eye(2), atol=0.05)
        pairs = [math.dist(a, b) for place, a in enumerate(MEANS[classes]) for b in MEANS[classes][:place]]
        assert sum(pairs) / len(pairs) == pytest.approx(2)  # times i


def test_the_best_accuracy_is_what_the_best_rule_gets():
    for classes, i, steps in ((2, 1, 1), (3, 1, 1), (3, 1, 20)):
        x, y = simulated(classes, i, steps, 60_000 // steps, seed=1)
        means = i * np.array(MEANS[classes])
        found = np.square(x.mean(1)[:, None] - means).sum(-1).argmin(1)  # equal covariances: the nearest mean
        assert bayes(classes, i, steps) == pytest.approx(np.mean(found == y), abs=0.007)


def test_splits_share_nothing(tmp_path):
    data = split_of("iris", 3, tmp_path)
    assert (data.x.shape, data.test_x.shape) == ((105, 1, 4), (45, 1, 4))
    assert np.bincount(data.test_y).tolist() == [15, 15, 15]
    other = split_of("iris", 4, tmp_path)
    assert not np.array_equal(data.x, other.x)
    first, second = split_of(named(2, 1, 20), 0, tmp_path), split_of(named(2, 1, 20), 1, tmp_path)
    assert first.x.shape == (45, 20, 2)
    assert not np.array_equal(first.test_x, second.test_x)


def income(folder):
    """Adult in small: the younger of two jobs is rich, and a test row has a job that training has not."""
    rows = [f"{20 + age}, {'Private' if age % 2 else '?'}, {'<=50K' if age % 2 else '>50K'}" for age in range(10)]
    (folder / "uci_adult_train.csv.xz").write_bytes(lzma.compress("\n".join(rows).encode()))
    (folder / "uci_adult_test.csv").write_text("30, Private, <=50K.\n31, State, >50K.\n?, Private, >50K.\n")
    return folder


def test_adult_is_read_as_numbers(tmp_path):
    facts = keep_adult(income(tmp_path), tmp_path / "out")
    data = split_of("adult", 0, tmp_path / "out", facts["digest"])
    assert facts["features"] == 2
    assert sorted(data.x[:, 0].tolist()) == [[20.0 + age, float(age % 2)] for age in range(10)]
    assert data.test_x[:, 0].tolist() == [[30.0, 1.0], [31.0, 0.0], [24.5, 1.0]]  # strange job, missing age
    assert data.test_y.tolist() == [0, 1, 1]
    (tmp_path / "uci_adult_test.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no uci_adult_test.csv, uci_adult_test.csv.xz or"):
        keep_adult(tmp_path, tmp_path / "out")


def test_what_work_costs():
    def work():
        made = torch.ones(5_000_000, dtype=torch.float64)
        return float(made.sum())

    total, cost = costing(work)
    assert total == 5e6
    assert cost.seconds > 0
    assert cost.megabytes is None or 35 < cost.megabytes < 60


def test_transformers_have_the_published_sizes():
    # Attention: queries, keys, values 2 → 160 and back; maps 2 → 32 → 2; two norms; 2 → 8 → 3.
    parts = 3 * (2 * 160 + 160) + (160 * 2 + 2) + (2 * 32 + 32) + (32 * 2 + 2) + 4 + 4 + (2 * 8 + 8) + (8 * 3 + 3)
    assert sum(weight.numel() for weight in Transformer("published", 2, 3).parameters()) == parts
    recipe = recipe_of("published", every=10, seed=0)
    assert (recipe.steps, recipe.optimiser, recipe.lr) == (2000, "rmsprop", 1e-2)
    model = Transformer("published", 2, 3).eval()
    x = torch.randn(4, 6, 2)
    assert torch.allclose(model(x), model(x.flip(1)), atol=1e-5)  # no positions


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_multiplies_scores_of_steps(method):
    x, y = simulated(2, 4, 3, 60, seed=0)
    learned = learn(method, x, y, 0, "cpu", epochs=20)
    test, truth = simulated(2, 4, 3, 200, seed=1)
    assert (learned.predict(test) == truth).mean() > 0.95


def test_points_are_followed_from_the_input_and_from_the_start(tmp_path):
    row = CourseTrial(network="published", classes=2, i=1, seed=0, epochs=3).run(tmp_path, "cpu")
    assert set(row["starts"]) == {"input", "untrained", "before"}
    assert row["starts"].pop("before")["efficiency"] == pytest.approx(1)  # a way of two places is straight
    for told in row["starts"].values():
        assert 0 < told["by_lot"] < told["optimality"] <= 1
        assert 0 < told["shape_by_lot"] < told["shape"] <= 1
        assert told["wasserstein"] <= told["distance"]
        assert 0 < told["published"] < told["efficiency"] <= 1
    assert 0.4 < row["accuracy"] <= 1
    other = CourseTrial(network="transformer", classes=2, i=1, seed=0, epochs=2).run(tmp_path, "cpu")
    assert set(other["starts"]) == {"untrained"}


def test_optimality_without_the_means_is_that_of_the_shape():
    start = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    labels = np.repeat([0, 1], 30)
    moved = start + 50.0  # far, and straight ahead
    trial = CourseTrial(network="published", classes=2, i=1, seed=0)
    told = trial._metrics(torch.stack((start, moved)), labels)
    assert told["optimality"] == told["shape"] == pytest.approx(1, abs=1e-4)
    assert told["by_lot"] > 0.99  # a class that goes far goes well whoever goes where
    assert told["shape_by_lot"] < 1e-3  # which its shape does not
    swapped = moved.clone()
    swapped[:30] = moved[:30].flip(0)
    told = trial._metrics(torch.stack((start, swapped)), labels)
    assert told["optimality"] > 0.99
    assert told["shape"] < 1e-3


def test_heads_learn_where_the_data_are_or_where_they_are_not(tmp_path):
    task = Task("published", 3, 4, 0, "cpu")
    means = torch.stack([task.samples.x[task.samples.y == place].mean((0, 1)) for place in range(3)]).double()
    for start, sides in (("toward", [0, 1, 2]), ("away", [2, 0, 1])):
        where = StartTrial(start=start, classes=3, i=4, seed=0)._centres(task)
        assert torch.allclose(where.norm(dim=1), torch.tensor(9.0).double())
        nearest = torch.cdist(where, 9 * means / means.norm(dim=1, keepdim=True)).argmin(1)
        assert nearest.tolist() == sides
    row = StartTrial(start="toward", classes=3, i=4, seed=0, epochs=6).run(tmp_path, "cpu")
    assert len(row["curve"]) == 7
    assert row["curve"][0] > 0.5  # the head alone finds most of them already
    assert row["in_time"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """All of it in small: a set, two courses, a head."""
    folder = tmp_path_factory.mktemp("transport")
    small = {"FOLLOWED": [("published", 2, 1), ("transformer", 2, 1)], "BEGUN": [(2, 1)]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(f"keyquery_studies.transport.study.{name}", value)
        for module in ("trajectories", "datasets"):
            patch.setattr(f"keyquery_studies.transport.{module}.LEARN", {1: 120, 20: 16})
            patch.setattr(f"keyquery_studies.transport.{module}.TEST", {1: 200, 20: 100})
        patch.setattr("keyquery_studies.transport.trajectories.FIRST", 20)

        def run():
            return run_transport(None, folder / "out", seeds=(0,), sets=(named(2, 1, 1),), epochs=1)

        yield run(), folder / "out", run


def test_results_are_kept_and_not_made_again(study):
    reading, out, run = study
    before = {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    again = run()
    assert (again.rows, again.courses, again.begun) == (reading.rows, reading.courses, reading.begun)
    assert {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()} == before
    assert [row["method"] for row in reading.rows] == list(methods_of(named(2, 1, 1)))
    assert (len(reading.courses), len(reading.begun)) == (2, 4)


def test_the_study_is_shown_drawn_and_comes_back(study):
    reading, _, _ = study
    page = io.StringIO()
    terminal.show(reading, Console(width=100, file=page))
    text = page.getvalue()
    assert "2 classes, i = 1: test accuracy, 1 seed; Bayes accuracy 0.7602" in text
    assert text.count("transport, random pairs") == 1
    assert max(map(len, text.splitlines())) <= 100
    again = kq.Reading.load(reading.to_json())
    assert again.summary() == reading.summary()
    assert len(reading.plot().get_axes()) == 4
    assert {row["part"] for row in reading.records()} == {"accuracy", "course", "start"}


def row(method, seed, accuracy, seconds, dataset="iris"):
    costs = {"seconds": seconds, "megabytes": 1.0}
    return {"dataset": dataset, "method": method, "seed": seed, "accuracy": accuracy, **costs}


def test_a_summary_compares_seed_by_seed():
    rows = [row("transformer", 0, 0.9, 4.0), row("ot", 0, 0.8, 1.0), row("transformer", 1, 0.5, 2.0)]
    rows += [row("ot", 1, 0.6, 2.0), row("ot", 0, 0.7, 1.0, named(2, 1, 1))]
    reading = TransportStudy(rows=rows, courses=[], begun=[], provenance={})
    _, ours, alone = reading.summary()
    assert (ours["gap"], ours["times"], ours["best"]) == (pytest.approx(0.0), pytest.approx(2.5), None)
    assert ours["gap_sd"] == pytest.approx(0.2 / math.sqrt(2))
    assert (alone["gap"], alone["times"], alone["best"]) == (None, None, pytest.approx(0.76025, abs=1e-5))
    with pytest.raises(ValueError, match="the figure needs all parts of the study"):
        reading.plot()


def test_settings_that_are_other_ones_have_other_names():
    base = {"dataset": "iris", "method": "ot", "seed": 0}
    names = [MethodTrial(**{**base, **other}).name for other in ({}, {"seed": 1}, {"method": "mean"}, {"limit": 3})]
    assert len(set(names)) == 4


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"part must be one of 'accuracy', 'course', 'start', 'all', got 'acuracy'"):
        run_transport(part="acuracy")
    with pytest.raises(ValueError, match=r"set must be one of .* did you mean 'iris'"):
        run_transport(sets=["irs"])
    with pytest.raises(ValueError, match="adult needs a folder with uci_adult_train"):
        run_transport(sets=["adult"])
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        run_transport(epochs=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="out must be a folder"):
        run_transport(out=tmp_path / "file", sets=["iris"], part="accuracy")


def test_the_command_line_runs_it(study, tmp_path):
    reading, out, _ = study
    options = ["--part", "accuracy", "--dataset", named(2, 1, 1), "--seed", "0", "--epochs", "1", "--device", "cpu"]
    files = ["--out", str(out), "--json", str(tmp_path / "a.json")]
    run = CliRunner().invoke(cli.app, ["study", "transport", *options, *files])
    assert run.exit_code == 0, run.output
    assert "2 classes, i = 1: test accuracy" in run.output
    assert kq.Reading.load(tmp_path / "a.json").rows == reading.rows
    run = CliRunner().invoke(cli.app, ["study", "transport", "--part", "course", "--picture", str(tmp_path / "a.svg")])
    assert run.exit_code != 0
