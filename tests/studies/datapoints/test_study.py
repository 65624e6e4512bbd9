"""The study of attention between datapoints, small: trainings, what is made of the figures, and how it is shown."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from keyquery_studies.common.runner import Job, run_jobs
from keyquery_studies.datapoints import baselines
from keyquery_studies.datapoints import trial as trainings
from keyquery_studies.datapoints.lookups import LookUp
from keyquery_studies.datapoints.study import DatapointStudy, Plan, over_folds
from keyquery_studies.datapoints.study import run as run_datapoints
from keyquery_studies.datapoints.tables import prepare_tables
from keyquery_studies.datapoints.trial import TableTrial
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.pages import terminal


@pytest.fixture(scope="module")
def facts(sheets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return folder, prepare_tables(sheets, folder, ["yacht"])


def trial(facts, **options):
    small = {"embedding": 8, "depth": 2, "heads": 2, "steps": 12}
    return TableTrial(**{"table": "yacht", "digest": facts[1]["yacht"]["digest"], "fold": 0, **small, **options})


# Trainings


def test_a_training_says_what_it_was_and_what_came_of_it(facts):
    row = trial(facts, steps=40).run(facts[0], "cpu")
    assert not row["partial"]
    assert (row["steps_run"], row["learned"], row["held"], row["test"]) == (40, 42, 12, 6)
    assert row["clean"]["rmse"] == pytest.approx(row["rmse"])
    assert row["corrupted"]["rmse"] > 0
    assert len(row["row_heads"]) == 2
    assert row["validation"] == pytest.approx(min(validation for _, _, validation in row["curve"]), rel=1e-4)
    assert json.loads(json.dumps(row)) == row


def test_a_trial_is_a_job_named_by_all_its_settings(facts):
    one = trial(facts)
    assert isinstance(one, Job)
    assert one.name == replace(one, deadline=5.0).name
    others = [{"fold": 1}, {"protocol": "published"}, {"kernel": "psd"}, {"steps": 13}, {"precision": "full"}]
    assert len({one.name, *(replace(one, **other).name for other in others)}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["published", "inductive"])
def test_a_training_that_is_broken_off_ends_as_if_it_had_not_been(facts, tmp_path, monkeypatch, protocol):
    source = facts[0] / f"yacht-{facts[1]['yacht']['digest']}.npz"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    whole = trial(facts, protocol=protocol).run(facts[0], "cpu")
    asked = iter([0.0] * 7 + [10.0] * 9)  # once before the training, once before its first step
    monkeypatch.setattr(trainings, "time", lambda: next(asked))
    one = trial(facts, protocol=protocol, deadline=5.0)
    broken = run_jobs([one], tmp_path, "cpu")[0]
    assert (broken["partial"], broken["steps_run"]) == (True, 6)
    assert "rmse" not in broken
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    monkeypatch.setattr(trainings, "time", lambda: 0.0)
    found = run_jobs([one], tmp_path, "cpu")[0]
    changing = ("seconds",)
    assert {k: v for k, v in found.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }
    assert not list((tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr(trainings, "train", None)
    assert run_jobs([one], tmp_path, "cpu")[0] == found  # is done, and not done again


def test_what_begins_too_late_is_not_begun(facts, tmp_path):
    row = run_jobs([trial(facts, deadline=1.0)], tmp_path, "cpu")[0]
    assert (row["partial"], row["steps_run"]) == (True, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table": "none"}, "table"),
        ({"fold": 10}, "fold"),
        ({"protocol": "usual"}, "protocol"),
        ({"precision": "short"}, "precision"),
        ({"heads": 3}, "heads must divide embedding"),
    ],
)
def test_bad_trials_are_refused(facts, given, message):
    with pytest.raises(ValueError, match=message):
        trial(facts, **given)


# The plan


def test_what_takes_longest_comes_first():
    facts = {
        name: {"digest": "", "rows": rows, "features": features}
        for name, rows, features in (("boston", 506, 13), ("yacht", 308, 6), ("concrete", 1030, 8), ("breast", 569, 30))
    }
    jobs = Plan(part="npt").trainings(facts, None)
    assert [(job.table, job.protocol) for job in jobs[:3]] == [("concrete", "published")] * 3
    folds = {(job.table, job.protocol): 0 for job in jobs}
    for job in jobs:
        folds[job.table, job.protocol] += 1
    counts = {"boston": 10, "yacht": 3, "concrete": 3, "breast": 10}
    assert folds == {(table, protocol): n for table, n in counts.items() for protocol in ("published", "inductive")}
    compared = Plan().compared(facts, None)
    assert len(compared) == 2 * 3 * 5
    assert {job.embedding for job in compared} == {32}


def test_large_tables_have_one_split_and_no_published_protocol_here():
    facts = {"adult": {"digest": "", "rows": 48842, "features": 14}}
    assert [(job.fold, job.protocol) for job in Plan(tables=("adult",)).trainings(facts, None)] == [(0, "inductive")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"part": "some"}, "part"),
        ({"tables": ("none",)}, "table"),
        ({"kernels": ("rbf",)}, "kernel"),
        ({"minutes": -1.0}, "minutes"),
        ({"precision": "short"}, "precision"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_plans_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Plan(**given)


# The study


@pytest.fixture(scope="module")
def study(sheets, tmp_path_factory):
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("out")
    plan = Plan(tables=("yacht", "boston"), folds=(0, 1), steps=2, embedding=8, depth=2, kernels=("general", "psd"))
    with pytest.MonkeyPatch.context() as patch:
        few = {"learning_rate": (0.1,), "max_leaf_nodes": (8,), "min_samples_leaf": (5,), "iterations": 20}
        patch.setattr(baselines, "BOOSTING", few)
        patch.setattr(baselines, "PERCEPTRON", {"hidden": ((8,),), "alpha": (1e-2,), "epochs": 20})
        yield run_datapoints(sheets, out, plan, device="cpu"), out, plan


@pytest.mark.slow
def test_it_has_every_part(study):
    reading, _, _ = study
    assert len(reading.npt) == 2 * 2 * 2
    assert len(reading.kernels) == 2 * 2
    assert len(reading.baselines) == 2 * 2 * 3
    assert len(reading.lookup) == 5
    assert {row["part"] for row in reading.summary()} == {"npt", "kernels", "baselines"}
    assert kq.Reading.load(reading.to_json()) == reading
    assert len(reading.records()) == 8 + 4 + 12 + 5


def test_what_is_done_is_not_done_again(study, monkeypatch):
    reading, out, plan = study
    for kind in (TableTrial, baselines.Baseline, LookUp):
        monkeypatch.setattr(kind, "run", lambda *given: pytest.fail("it was done again"))
    again = run_datapoints(None, out, plan, device="cpu")  # the tables lie there, too
    assert (again.npt, again.kernels, again.baselines, again.lookup) == (
        reading.npt, reading.kernels, reading.baselines, reading.lookup,
    )  # fmt: skip


def test_runs_that_were_made_apart_are_joined(study):
    reading, _, _ = study
    halves = [
        DatapointStudy(npt=reading.npt[::2], kernels=[], baselines=reading.baselines, lookup=[]),
        DatapointStudy(npt=reading.npt[1::2], kernels=reading.kernels, baselines=[], lookup=reading.lookup),
    ]
    unfinished = {**reading.npt[0], "partial": True, "steps_run": 1}
    more = DatapointStudy(npt=[unfinished], kernels=[], baselines=[], lookup=[])
    joined = DatapointStudy.joined(more, *halves)
    assert (joined.npt, joined.kernels, joined.baselines, joined.lookup) == (
        reading.npt, reading.kernels, reading.baselines, reading.lookup,
    )  # fmt: skip
    assert joined.summary() == reading.summary()


def row(fold, rmse, spoilt, **more):
    heads = [{"layer": 0, "head": h, "symmetric": s, "on_data": 0.9, "at_start": {"symmetric": 0.5, "on_data": 0.7}}
             for h, s in enumerate((0.6, 0.8))]  # fmt: skip
    figures = {"rmse": rmse, "clean": {"rmse": rmse}, "corrupted": {"rmse": spoilt}, "row_heads": heads}
    return {"table": "boston", "protocol": "published", "kernel": "general", "part_of": "npt", "fold": fold,
            "name": str(fold), "partial": False, **figures, **more}  # fmt: skip


def test_the_summary_is_its_definition():
    rows = [row(0, 2.0, 3.0), row(1, 4.0, 4.5), {**row(2, 9.0, 9.0), "partial": True}]
    classes = [
        {"table": "breast", "model": "boosting", "part_of": "baselines", "name": "b", "fold": 0,
         "accuracy": 0.9, "auroc": 0.95, "nll": 0.2},
    ]  # fmt: skip
    reading = DatapointStudy(npt=rows, kernels=[], baselines=classes, lookup=[])
    ours, trees = reading.summary()
    assert (ours["folds"], ours["rmse"], ours["rmse_se"]) == (2, 3.0, 1.0)
    assert ours["grows"] == pytest.approx(3.75 / 3 - 1)
    assert ours["grows_se"] == pytest.approx(np.std([0.5, 0.125], ddof=1) / np.sqrt(2))
    assert ours["symmetric"] == pytest.approx(0.7)
    assert (ours["symmetric_at_start"], ours["on_data"], ours["on_data_at_start"]) == pytest.approx((0.5, 0.9, 0.7))
    assert (trees["accuracy"], trees["accuracy_se"], trees["rmse"], trees["grows"]) == (0.9, None, None, None)
    assert over_folds("nll", [0.1, None]) == {"nll": None, "nll_se": None}


def test_of_classes_the_accuracy_that_is_lost_counts():
    lost = [{**row(0, 1.0, 1.0), "clean": {"accuracy": 0.9}, "corrupted": {"accuracy": 0.8}}]
    found = DatapointStudy(npt=lost, kernels=[], baselines=[], lookup=[]).summary()[0]
    assert found["grows"] == pytest.approx(0.1)


def test_it_needs_data_or_what_an_earlier_run_left(tmp_path):
    with pytest.raises(FileNotFoundError, match="'yacht' needs uci_yacht_data"):
        run_datapoints(None, tmp_path / "out", Plan(part="npt", tables=("yacht",)))
    with pytest.raises(NotADirectoryError, match="data must be a folder"):
        run_datapoints(tmp_path / "none", tmp_path / "out", Plan(part="npt", tables=("yacht",)))


# Shown


def shown(reading):
    page = io.StringIO()
    terminal.show(reading, Console(width=100, file=page))
    return page.getvalue()


def test_the_study_is_shown_and_drawn(study):
    reading, _, _ = study
    text = shown(reading)
    for words in ("NPT, published", "NPT, inductive", "boosted trees", "error grows %", "psd", "nearest neighbour"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    figure = reading.plot()
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["Boston", "Yacht", "Other rows corrupted", "Cross-row heads", "Cross-row kernels: Boston"]


@pytest.mark.parametrize(("part", "panels"), [("npt", 4), ("baselines", 2), ("kernels", 1)])
def test_only_what_ran_is_shown_and_drawn(study, part, panels):
    reading, _, _ = study
    every = {"npt": [], "kernels": [], "baselines": [], "lookup": []}
    alone = DatapointStudy(**{**every, part: getattr(reading, part)})
    assert ("boosted trees" in shown(alone)) == (part == "baselines")
    assert len(alone.plot().axes) == panels
    with pytest.raises(ValueError, match="look-ups alone has no figure"):
        DatapointStudy(**{**every, "lookup": reading.lookup}).plot()


def test_what_is_not_finished_is_told():
    reading = DatapointStudy(npt=[row(0, 1.0, 1.0, partial=True)], kernels=[], baselines=[], lookup=[])
    assert "1 training is not finished" in shown(reading)


def test_the_command_line_runs_it(study, sheets, tmp_path):
    _, out, _ = study
    sizes = ["--steps", "2", "--embedding", "8", "--depth", "2", "--table", "yacht", "--fold", "0", "--device", "cpu"]
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--picture", str(tmp_path / "a.svg")]
    given = ["study", "datapoints", "--data", str(sheets), "--out", str(out), "--part", "npt", *sizes, *files]
    run = CliRunner().invoke(cli.app, given)
    assert run.exit_code == 0, run.output
    assert "NPT, inductive" in run.output
    reading = kq.Reading.load(tmp_path / "a.json")
    assert [(row["table"], row["fold"], row["protocol"]) for row in reading.npt] == [
        ("yacht", 0, "published"),
        ("yacht", 0, "inductive"),
    ]
    assert (tmp_path / "a.csv").read_text().count("\n") == 3
    assert "<svg" in (tmp_path / "a.svg").read_text()
    given = ["study", "datapoints", "--part", "lookup", "--picture", str(tmp_path / "b.svg")]
    assert "not lookup" in str(CliRunner().invoke(cli.app, given).exception)
    told = " ".join(CliRunner().invoke(cli.app, ["study", "datapoints", "--help"]).output.split())
    for words in ("--minutes", "--protocol", "--precision", "--fold"):
        assert words in told
