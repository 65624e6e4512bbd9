"""The study of primal attention: what is planned, how it is put together, shown and joined."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.report import terminal
from keyquery.studies.arena.tasks import TASKS
from keyquery.studies.primal import ATTENTIONS, PROTOCOLS, VARIANTS, Plan, PrimalStudy, _source, primal


def arena_row(task, attention, seed, accuracy, **changes):
    usual = {"share": 1.0, "schedule": "published", "start": "published", "steps": None, "batch": None, "data": "x"}
    facts = {
        "validation": accuracy,
        "share_run": 1.0,
        "schedule_run": 1.0,
        "steps_run": 100,
        "curve": [[100, accuracy]],
    }
    published = TASKS[task].accuracy[attention] / 100
    row = {"task": task, "attention": attention, "seed": seed, "accuracy": accuracy, "published": published}
    return {**row, **usual, **facts, **changes}


def timed(attention, ms):
    ends = {"ms_low": ms / 2, "ms_high": 2 * ms, "faster": 10 / ms, "faster_low": 9 / ms, "faster_high": 11 / ms}
    return {
        "attention": attention,
        "ms": ms,
        "busy_ms": 0.8 * ms,
        "peak_bytes": 2**30,
        "faster_than_eager": 40 / ms,
        **ends,
    }


@pytest.fixture
def reading():
    names = ("attention", "protocol", "variant")
    usual = [(attention, protocol, "default") for attention in ATTENTIONS for protocol in PROTOCOLS]
    others = [("primal", PROTOCOLS[0], variant) for variant in VARIANTS[1:]]
    series = [
        {"dataset": "Waves", **dict(zip(names, setting, strict=True)), "seed": seed}
        | {"accuracy": 0.5 + seed / 10, "last_accuracy": 0.5}
        for setting in usual + others
        for seed in (0, 1)
    ]
    arena = [arena_row("listops", attention, seed, 0.3 + 0.1 * seed) for attention in ATTENTIONS for seed in (0, 1)]
    arena += [arena_row("image", "primal", 0, 0.4, share=0.2, share_run=0.2, schedule_run=0.2)]
    eager = {"attention": "eager", "ms": None, "note": "does not fit into memory"}
    steps = [timed("primal", 5.0), timed("primal+", 8.0), timed("general", 10.0), eager]
    speed = [{"task": "text", "where": "a GPU", "device": "a GPU", "rows": steps}]
    return PrimalStudy(series=series, arena=arena, speed=speed)


def test_the_summary_is_mean_and_spread_over_seeds(reading):
    rows = [row for row in reading.summary() if row["part"] == "arena"]
    assert [(row["task"], row["attention"], row["seeds"]) for row in rows[-2:]] == [
        ("listops", "general", 2),
        ("image", "primal", 1),
    ]
    assert rows[0]["accuracy"] == pytest.approx(0.35)
    assert rows[0]["accuracy_sd"] == pytest.approx(0.1 / 2**0.5)
    assert (rows[0]["published"], rows[-1]["share_run"], rows[-1]["accuracy_sd"]) == (0.373, 0.2, None)
    for part in ("series", "arena", "speed"):
        assert len({tuple(row) for row in reading.summary() if row["part"] == part}) == 1  # the same keys
    again = kq.Reading.load(reading.to_json())
    assert isinstance(again, PrimalStudy)
    assert again.summary() == reading.summary()
    assert len(again.records()) == len(reading.series) + len(reading.arena) + 4
    assert all("curve" not in row for row in again.records())


def test_decay_is_read_layer_by_layer():
    usual = {"dataset": "Waves", "attention": "primal", "protocol": "held out", "variant": "default"}
    decays = [
        {"start": [[0.5, 0.3, 0.2], None], "trained": [[0.95, 0.05], None]},
        {"start": [[0.7, 0.3], None], "trained": [[0.85, 0.1, 0.05], None]},
    ]
    rows = [{**usual, "seed": seed, "decay": decay} for seed, decay in enumerate(decays)]
    [found] = PrimalStudy(series=rows, arena=[], speed=[]).decays()
    assert (found["layer"], found["seeds"]) == (0, 2)
    assert (found["start"], found["trained"]) == pytest.approx((0.6, 0.9))
    assert (found["start_most"], found["trained_most"]) == (2.5, 1.5)


def test_of_runs_joined_the_longest_counts(reading):
    longer = [arena_row("image", "primal", 0, 0.45, share=0.2, share_run=0.2, steps_run=200)]
    other = PrimalStudy(series=[], arena=[*longer, arena_row("image", "general", 0, 0.4)], speed=reading.speed)
    first = replace(reading, series=[])
    for joined in (PrimalStudy.joined(first, other), PrimalStudy.joined(other, first)):
        assert len(joined.arena) == len(reading.arena) + 1
        [row] = [row for row in joined.arena if (row["task"], row["attention"]) == ("image", "primal")]
        assert row["accuracy"] == 0.45
        assert joined.speed == reading.speed
    assert len(joined.provenance["runs"]) == 2


def test_tables_fit_the_terminal(reading):
    console = Console(width=100, file=io.StringIO())
    terminal.show(reading, console)
    text = console.file.getvalue()
    assert "ListOps  primal                  100%  35.0 ± 7.1       37.3" in text
    assert "Image    primal                   20%        40.0       43.0" in text
    assert "5.0 (2.5–10.0)   4.0  1.00  2.00×  8.00×          –" in text
    assert "does not fit" in text
    words = " ".join(text.split())
    assert "Runs below 100 % of the steps were cut short: the learning rate has not come down." in words
    assert max(map(len, text.splitlines())) <= 88


def test_the_picture_has_a_panel_a_part(reading):
    figure = reading.plot()
    titles = ["series (held out)", "Long Range Arena (share of the steps)", "a training step"]
    assert [axis.get_title() for axis in figure.get_axes()] == titles
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["primal", "primal+", "softmax, fused", "published"]
    assert [axis.get_title() for axis in replace(reading, series=[], speed=[]).plot().get_axes()] == titles[1:2]
    with pytest.raises(ValueError, match="a study of variants alone has no picture"):
        PrimalStudy(series=[], arena=[], speed=[]).plot()


def test_the_plan_is_the_promised_one():
    facts = {task: {"digest": task} for task in TASKS}
    jobs = Plan().trainings(facts)
    assert len({job.name for job in jobs}) == len(jobs) == 4 * 3 * 3
    assert {(job.task, job.share) for job in jobs} == {
        ("listops", 1.0),
        ("text", 1.0),
        ("image", 0.2),
        ("pathfinder", 0.2),
    }
    assert [job.seed for job in jobs[:12]] == [0] * 12  # seed after seed
    with pytest.raises(
        ValueError, match="part must be one of 'series', 'ablation', 'arena', 'speed', 'all', got 'lra'"
    ):
        Plan(part="lra")
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 2"):
        Plan(share=2.0)
    with pytest.raises(ValueError, match="schedule must be one of 'published', 'shortened', got 'long'"):
        Plan(schedule="long")


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Two sets, each of two classes, as .ts files."""
    folder, rng = tmp_path_factory.mktemp("series"), np.random.default_rng(0)
    for name in ("Waves", "Vowels"):
        for part in ("TRAIN", "TEST"):
            values = [",".join(f"{value:.3f}" for value in rng.normal(i % 2, 1, 12)) for i in range(10)]
            lines = [f"{row}:{'ab'[i % 2]}" for i, row in enumerate(values)]
            (folder / f"{name}_{part}.ts").write_text("\n".join(["@classLabel true a b", "@data", *lines]) + "\n")
    return folder


def test_series_are_tried_under_both_protocols_and_taken_apart(series, tmp_path):
    tiny = {"width": 16, "epochs": 1}
    both = primal(series, tmp_path, Plan(part="series", seeds=(0,), **tiny), "cpu")
    assert len(both.series) == 2 * 3 * 2
    assert {row["rank"] for row in both.series if row["attention"] != "general"} == {2}  # as wide as a head
    chosen = {"seeds": (0, 1), "datasets": ("Waves",), **tiny}
    apart = primal(None, tmp_path, Plan(part="ablation", **chosen), "cpu")  # the arrays of the first run
    assert [row["variant"] for row in apart.series] == 2 * list(VARIANTS)
    assert {(row["dataset"], row["protocol"], row["attention"]) for row in apart.series} == {
        ("Waves", "held out", "primal")
    }
    joined = PrimalStudy.joined(both, apart, both)
    assert len(joined.series) == len(both.series) + len(apart.series) - 1  # the default of one seed is in both
    first = [row for row in joined.decays() if row["variant"] == "default" and row["layer"] == 0]
    assert len(first) == 2 * 3 * 2
    assert all(0 < row["start"] <= 1 and 0 < row["trained"] <= 1 for row in first)
    with pytest.raises(ValueError, match="dataset must be one of 'Vowels', 'Waves', got 'Wave'"):
        primal(None, tmp_path, Plan(part="series", datasets=("Wave",)), "cpu")


def test_the_command_runs(tmp_path):
    sizes = "--steps 2 --batch 2 --examples 4 --seed 1 --task pathfinder --attention primal --device cpu --share 1"
    files = ["--json", str(tmp_path / "a.json"), "--out", str(tmp_path), "--picture", str(tmp_path / "a.svg")]
    arguments = ["study", "primal", "--part", "arena", *sizes.split(), *files]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "Pathfinder  primal" in result.output
    [row] = kq.Reading.load(tmp_path / "a.json").arena
    assert (row["seed"], row["steps_run"], row["partial"], row["batch"]) == (1, 2, False, 2)
    assert len(list((tmp_path / "results").iterdir())) == 1
    refused = CliRunner().invoke(cli.app, ["study", "primal", "--part", "arena", "--task", "text", "--seed", "0"])
    assert "task 'text' needs a .tsv file with columns split, label and text" in str(refused.exception)


def test_the_files_of_a_folder_are_found(tmp_path):
    for name in ("a.tsv.xz", "imdb.tsv.xz", "b.npz", "c.npz"):
        (tmp_path / name).touch()
    assert _source("text", tmp_path).name == "imdb.tsv.xz"
    with pytest.raises(ValueError, match=r"data must hold one .npz file for task 'image', got b.npz, c.npz"):
        _source("image", tmp_path)
    with pytest.raises(ValueError, match="data must be a folder"):
        _source("image", tmp_path / "b.npz")
