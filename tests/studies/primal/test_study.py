"""The study of primal attention: what is planned, how it is put together, shown and joined."""

import csv
import io
import json
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from keyquery_studies.primal.arena.tasks import TASKS
from keyquery_studies.primal.released_code import published_regularizer
from keyquery_studies.primal.study import ATTENTIONS, PROTOCOLS, VARIANTS, Plan, PrimalStudy
from keyquery_studies.primal.study import run as run_primal
from keyquery_studies.primal.uea_series import PUBLISHED
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.learn.layers import PrimalAttention
from keyquery.pages import terminal


def series_row(attention="primal", protocol="held out", variant="default", **changes):
    sizes = {"width": 512, "rank": 20, "eta": 0.1, "epochs": 100, "digest": "x", "seed": 0}
    row = {"dataset": "EthanolConcentration", "attention": attention, "protocol": protocol, "variant": variant}
    return {**row, **sizes, "accuracy": 0.5, "last_accuracy": 0.5, **changes}


def study(**parts):
    return PrimalStudy(**{"series": [], "ablation": [], "arena": [], "speed": [], **parts})


def arena_row(task, attention, seed, accuracy, **changes):
    usual = {"share": 1.0, "schedule": "published", "start": "published", "steps": None, "batch": None, "data": "x"}
    run = {"share_run": 1.0, "schedule_run": 1.0, "steps_run": 100}
    facts = {"validation": accuracy, "curve": [[100, accuracy]], **run}
    published = TASKS[task].accuracy[attention] / 100
    row = {"task": task, "attention": attention, "seed": seed, "accuracy": accuracy, "published": published}
    return {**row, **usual, **facts, **changes}


def timed(attention, ms):
    ends = {"ms_low": ms / 2, "ms_high": 2 * ms, "faster": 10 / ms, "faster_low": 9 / ms, "faster_high": 11 / ms}
    others = {"busy_ms": 0.8 * ms, "peak_bytes": 2**30, "faster_than_eager": 40 / ms}
    return {"attention": attention, "ms": ms, **others, **ends}


@pytest.fixture
def reading():
    series = [
        series_row(attention, protocol, seed=seed, accuracy=0.5 + seed / 10)
        for attention in ATTENTIONS
        for protocol in PROTOCOLS
        for seed in (0, 1)
    ]
    ablation = [
        series_row(variant=variant, seed=seed, accuracy=0.2 + number / 100 + seed / 10)
        for number, variant in enumerate(VARIANTS)
        for seed in (0, 1)
    ]
    arena = [arena_row("listops", attention, seed, 0.3 + 0.1 * seed) for attention in ATTENTIONS for seed in (0, 1)]
    arena += [arena_row("image", "primal", 0, 0.4, share=0.2, share_run=0.2, schedule_run=0.2)]
    eager = {"attention": "eager", "ms": None, "note": "does not fit into memory"}
    steps = [timed("primal", 5.0), timed("primal+", 8.0), timed("general", 10.0), eager]
    speed = [{"task": "text", "where": "a GPU", "device": "a GPU", "rows": steps}]
    return PrimalStudy(series=series, ablation=ablation, arena=arena, speed=speed)


def shown(reading, width):
    console = Console(width=width, file=io.StringIO())
    terminal.show(reading, console)
    return console.file.getvalue()


def test_the_summary_is_mean_and_spread_over_seeds(reading):
    rows = [row for row in reading.summary() if row["part"] == "arena"]
    assert [(row["task"], row["attention"], row["seeds"]) for row in rows[-2:]] == [
        ("listops", "general", 2),
        ("image", "primal", 1),
    ]
    assert rows[0]["accuracy"] == pytest.approx(0.35)
    assert rows[0]["accuracy_sd"] == pytest.approx(0.1 / 2**0.5)
    assert (rows[0]["published"], rows[-1]["share_run"], rows[-1]["accuracy_sd"]) == (0.373, 0.2, None)
    for part in ("series", "ablation", "arena", "speed"):
        assert len({tuple(row) for row in reading.summary() if row["part"] == part}) == 1  # the same keys
    again = kq.Reading.load(reading.to_json())
    assert isinstance(again, PrimalStudy)
    assert again.summary() == reading.summary()
    assert len(again.records()) == len(reading.series) + len(reading.ablation) + len(reading.arena) + 4
    assert all("curve" not in row for row in again.records())


def test_the_summary_keeps_series_and_ablations_apart(reading):
    rows = reading.summary()
    compared, apart = ([row for row in rows if row["part"] == part] for part in ("series", "ablation"))
    assert {(row["attention"], row["protocol"], row["variant"]) for row in compared} == {
        (attention, protocol, "default") for attention in ATTENTIONS for protocol in PROTOCOLS
    }
    assert [row["accuracy"] for row in compared] == pytest.approx([0.55] * 6)  # the ablation's default is lower
    assert [row["variant"] for row in apart] == list(VARIANTS)
    assert [row["accuracy"] for row in apart] == pytest.approx([0.25, 0.26, 0.27, 0.28, 0.29, 0.30])
    assert all(row["accuracy_sd"] == pytest.approx(0.1 / 2**0.5) for row in compared + apart)
    assert {(row["width"], row["eta"], row["epochs"], row["seeds"]) for row in compared + apart} == {(512, 0.1, 100, 2)}


@pytest.mark.parametrize("part", ["series", "ablation"])
@pytest.mark.parametrize("change", [{"width": 128}, {"epochs": 40}, {"eta": 0.5}, {"rank": 8}, {"digest": "y"}])
def test_a_mean_is_of_trainings_that_are_alike_but_for_the_seed(part, change):
    rows = [series_row(seed=seed, accuracy=0.5, **more) for more in ({}, change) for seed in (0, 1)]
    found = study(**{part: [{**row, "accuracy": index / 10} for index, row in enumerate(rows)]}).summary()
    assert [row["seeds"] for row in found] == [2, 2]
    assert [row["accuracy"] for row in found] == pytest.approx([0.05, 0.25])


def test_decay_is_read_layer_by_layer():
    decays = [
        {"start": [[0.5, 0.3, 0.2], None], "trained": [[0.95, 0.05], None]},
        {"start": [[0.7, 0.3], None], "trained": [[0.85, 0.1, 0.05], None]},
    ]
    rows = [series_row(seed=seed, decay=decay) for seed, decay in enumerate(decays)]
    lost = [{**row, "variant": "no loss"} for row in rows[:1]]
    # the default is in both parts, and is counted once in each
    found, again, without = study(series=rows, ablation=rows + lost).decays()
    assert (found["part"], found["layer"], found["seeds"]) == ("series", 0, 2)
    assert (found["start"], found["trained"]) == pytest.approx((0.6, 0.9))
    assert (found["start_most"], found["trained_most"]) == (2.5, 1.5)
    assert again == {**found, "part": "ablation"}
    assert (without["part"], without["variant"], without["seeds"]) == ("ablation", "no loss", 1)
    assert (without["start"], without["start_sd"], without["trained_most"]) == (0.5, None, 1)


def test_of_runs_joined_the_longest_counts(reading):
    longer = [arena_row("image", "primal", 0, 0.45, share=0.2, share_run=0.2, steps_run=200)]
    other = study(arena=[*longer, arena_row("image", "general", 0, 0.4)], speed=reading.speed)
    first = replace(reading, series=[], ablation=[])
    for joined in (PrimalStudy.joined(first, other), PrimalStudy.joined(other, first)):
        assert len(joined.arena) == len(reading.arena) + 1
        [row] = [row for row in joined.arena if (row["task"], row["attention"]) == ("image", "primal")]
        assert row["accuracy"] == 0.45
        assert joined.speed == reading.speed
    assert len(joined.provenance["runs"]) == 2


@pytest.mark.parametrize("part", ["series", "ablation"])
def test_of_trainings_on_series_that_are_the_same_the_first_counts(reading, part):
    other = "ablation" if part == "series" else "series"
    own = getattr(reading, part)
    again = [{**row, "accuracy": 0.9} for row in own]  # the same settings
    changes = ({"width": 128}, {"epochs": 40}, {"eta": 0.5}, {"rank": 8}, {"digest": "y"}, {"seed": 7})
    more = [{**own[0], **change} for change in changes]
    joined = PrimalStudy.joined(study(**{part: own}), study(**{part: again + more}))
    assert getattr(joined, part) == [*own, *more]
    assert getattr(joined, other) == []
    both = PrimalStudy.joined(study(series=reading.series), study(ablation=reading.ablation))
    assert (both.series, both.ablation) == (reading.series, reading.ablation)  # though the default is in both


@pytest.mark.parametrize("width", [80, 100])
def test_tables_of_series_and_ablations_fit_the_terminal(reading, width):
    text = shown(replace(reading, arena=[], speed=[]), width)
    compared, apart = text.split("\n\n")
    lines = compared.splitlines()
    assert lines[0].rstrip() == "time series: test accuracy, mean of 2 seeds"
    assert [line.rstrip() for line in lines[2:]] == [
        f"EthanolConcentration  {name:<14}  {protocol:<9}  55.0 ± 7.1"
        for name in ("primal", "primal+", "softmax, fused")
        for protocol in PROTOCOLS
    ]
    lines = apart.splitlines()
    assert lines[0].rstrip() == "ablations of primal attention: test accuracy, validation split, mean of 2 seeds"
    assert [line.rstrip() for line in lines[2:]] == [
        f"EthanolConcentration  {variant:<16}  {25 + number}.0 ± 7.1" for number, variant in enumerate(VARIANTS)
    ]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("part", ["series", "ablation"])
def test_tables_tell_widths_and_epochs_apart(part):
    text = shown(study(**{part: [series_row(accuracy=0.4), series_row(accuracy=0.6, width=128)]}), 80)
    found = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines()[2:]}
    assert found == {"EthanolConcentration, width 512": "40.0", "EthanolConcentration, width 128": "60.0"}
    text = shown(study(**{part: [series_row(), series_row(width=128, epochs=40)]}), 100)
    assert "EthanolConcentration, width 128, epochs 40" in text


def test_tables_fit_the_terminal(reading):
    text = shown(reading, 80)
    assert "ListOps  primal                  100%  35.0 ± 7.1       37.3" in text
    assert "Image    primal                   20%        40.0       43.0" in text
    short = study(arena=[arena_row("image", "primal", 0, 0.4, share_run=0.0008)])
    assert "Image  primal            0.08%" in shown(short, 80)
    assert short.plot().get_axes()[0].get_xticklabels()[0].get_text() == "Image\n(0.08%)"
    assert "5.0 (2.5–10.0)   4.0  1.00  2.00×  8.00×      –" in text
    assert "does not fit" in text
    words = " ".join(text.split())
    assert "Runs below 100 % of the steps were stopped early, before the learning rate had decayed." in words
    assert max(map(len, text.splitlines())) <= 80


def test_times_of_any_size_fit_the_terminal():
    steps = [timed(name, ms) for name, ms in (("primal", 0.512), ("general", 98.76), ("eager", 4321.0))]
    steps[0] |= {"published_faster": 12.5, "peak_bytes": 99 * 2**30}
    speed = [{"task": "pathfinder", "where": "a GPU", "device": "a GPU", "rows": steps}]
    text = shown(study(speed=speed), 80)
    assert "…" not in text
    assert "0.5 (0.3–1.0)   0.4  99.00  19.5×  78.1×  12.5×" in text
    assert "98.8 (49.4–198)  79.0   1.00" in text
    assert "4321 (2160–8642)  3457   1.00" in text


def test_the_picture_has_a_panel_a_part(reading):
    figure = reading.plot()
    titles = ["time series (validation split)", "Long Range Arena (fraction of steps)", "training step"]
    assert [axis.get_title() for axis in figure.get_axes()] == titles
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["primal", "primal+", "softmax, fused", "published"]
    for panels, rows in (({}, 1), ({"series": [], "speed": []}, 2)):
        picture = replace(reading, **panels).plot()
        picture.draw_without_rendering()
        box = picture.legends[0].get_window_extent()
        assert 0 <= box.x0 < box.x1 <= picture.bbox.x1
        tops = {round(text.get_window_extent().y1) for text in picture.legends[0].get_texts()}
        assert len(tops) >= rows
    alone = replace(reading, series=[], speed=[])
    assert [axis.get_title() for axis in alone.plot().get_axes()] == titles[1:2]
    for none in (study(), study(ablation=reading.ablation)):
        with pytest.raises(ValueError, match="a study of ablations alone has no figure"):
            none.plot()


def heights(axis):
    """Where the dots of a panel stand."""
    return sorted(float(bars.lines[0].get_ydata()[0]) for bars in axis.containers)


def test_the_picture_shows_no_ablation(reading):
    panel = reading.plot().get_axes()[0]
    assert heights(panel) == pytest.approx([55.0] * 3)  # one an attention, held out; ablations are at 25 to 30
    assert [label.get_text() for label in panel.get_xticklabels()] == ["EthanolConcentration"]
    moved = [{**row, "dataset": "Waves", "accuracy": 0.01} for row in reading.ablation]
    panel = replace(reading, ablation=moved).plot().get_axes()[0]
    assert heights(panel) == pytest.approx([55.0] * 3)
    assert [label.get_text() for label in panel.get_xticklabels()] == ["EthanolConcentration"]
    narrow = [{**row, "width": 128, "accuracy": 0.1} for row in reading.series]
    panel = replace(reading, series=[*reading.series, *narrow]).plot().get_axes()[0]
    assert heights(panel) == pytest.approx([10.0] * 3 + [55.0] * 3)
    assert [label.get_text().split(", ")[1] for label in panel.get_xticklabels()] == ["width 512", "width 128"]


def test_the_plan_is_the_promised_one():
    facts = {task: {"digest": task} for task in TASKS}
    jobs = Plan().trainings(facts)
    assert len({job.name for job in jobs}) == len(jobs) == 4 * 3 * 5
    shares = {"listops": 1.0, "text": 1.0, "image": 0.2, "pathfinder": 0.2}
    assert {(job.task, job.share) for job in jobs} == set(shares.items())
    assert [job.seed for job in jobs[:12]] == [0] * 12  # seed after seed
    with pytest.raises(
        ValueError, match="part must be one of 'series', 'ablation', 'arena', 'speed', 'text', 'all', got 'lra'"
    ):
        Plan(part="lra")
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 2"):
        Plan(share=2.0)
    with pytest.raises(ValueError, match="schedule must be one of 'published', 'shortened', got 'long'"):
        Plan(schedule="long")


def test_what_is_planned_on_series():
    facts = {name: {"digest": name} for name in (*PUBLISHED, "Waves")}
    jobs = Plan().series(facts)
    assert len({job.name for job in jobs}) == len(jobs) == 5 * 11 * 3 * 2
    assert {job.variant for job in jobs} == {"default"}
    assert [job.seed for job in jobs[:66]] == [0] * 66
    etas = {job.dataset: job.eta for job in jobs if job.attention == "primal"}
    assert (etas["SelfRegulationSCP2"], etas["UWaveGestureLibrary"], etas["Heartbeat"]) == (0.0, 0.0, 0.5)  # published
    apart = Plan().ablation(facts)
    assert len({job.name for job in apart}) == len(apart) == 5 * 11 * len(VARIANTS)
    assert {(job.attention, job.protocol) for job in apart} == {("primal", "held out")}
    assert [job.variant for job in apart[: len(VARIANTS)]] == list(VARIANTS)
    both = {job.name for job in jobs} & {job.name for job in apart}
    assert len(both) == 5 * 9  # the default, trained once, but for two sets whose published eta is 0


def test_an_ablation_has_a_loss_to_leave_out():
    facts = {name: {"digest": name} for name in (*PUBLISHED, "Waves")}
    jobs = Plan(seeds=(0,), width=16).ablation(facts)
    expected = {name: rows[0][1] or 0.1 for name, rows in PUBLISHED.items()} | {"Waves": 0.1}
    assert {(job.dataset, job.eta) for job in jobs} == set(expected.items())
    assert min(expected.values()) == expected["SelfRegulationSCP2"] == expected["UWaveGestureLibrary"] == 0.1
    for job in jobs[-len(VARIANTS) :]:  # as a network, of the last set
        network = job.network(2, 2, 9)
        etas = {layer.eta for layer in network.modules() if isinstance(layer, PrimalAttention)}
        assert etas == {0.0 if job.variant == "no loss" else 0.1}
        network(torch.randn(3, 9, 2), torch.ones(3, 9, dtype=torch.bool))
        assert (published_regularizer(network) == 0) == (job.variant == "no loss")


@pytest.mark.slow
def test_series_are_tried_under_both_protocols_and_taken_apart(series, tmp_path):
    tiny = {"width": 16, "epochs": 1}
    both = run_primal(series, tmp_path, Plan(part="series", seeds=(0,), **tiny), "cpu")
    assert len(both.series) == 2 * 3 * 2
    assert both.ablation == []
    assert {row["rank"] for row in both.series if row["attention"] != "general"} == {2}  # as wide as a head
    chosen = {"seeds": (0, 1), "datasets": ("Waves",), **tiny}
    apart = run_primal(None, tmp_path, Plan(part="ablation", **chosen), "cpu")  # the arrays of the first run
    assert apart.series == []
    assert [row["variant"] for row in apart.ablation] == 2 * list(VARIANTS)
    assert {(row["dataset"], row["protocol"], row["attention"], row["eta"]) for row in apart.ablation} == {
        ("Waves", "held out", "primal", 0.1)
    }
    [default] = [row for row in both.series if (row["dataset"], row["attention"]) == ("Waves", "primal")][:1]
    assert apart.ablation[0] == default  # the same training, down to its seconds: it was not done again
    joined = PrimalStudy.joined(both, apart, both)
    assert (joined.series, joined.ablation) == (both.series, apart.ablation)
    first = [row for row in joined.decays() if row["layer"] == 0]
    assert [row["seeds"] for row in first if row["part"] == "series"] == [1] * 2 * 3 * 2
    named = [(row["variant"], row["seeds"]) for row in first if row["part"] == "ablation"]
    assert named == [(name, 2) for name in VARIANTS if name != "causal"]  # which has no kernel
    assert all(0 < row["start"] <= 1 and 0 < row["trained"] <= 1 for row in first)
    with pytest.raises(ValueError, match="dataset must be one of 'Vowels', 'Waves', got 'Wave'"):
        run_primal(None, tmp_path, Plan(part="series", datasets=("Wave",)), "cpu")


@dataclass(frozen=True, kw_only=True)
class Untimed:
    """In the place of a job that times steps, which takes long."""

    task: str
    where: str
    repeats: int
    batch: int | None

    @property
    def name(self):
        return f"untimed-{self.task}.json"

    def run(self, folder, device):
        return {"task": self.task, "where": self.where, "device": device, "rows": []}


@pytest.mark.slow
def test_all_is_put_together_in_its_parts(series, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[Plan.__module__], "Speed", Untimed)
    sizes = {"width": 16, "epochs": 1, "steps": 1, "batch": 2, "examples": (4, 2, 2), "share": 1.0}
    plan = Plan(seeds=(0,), datasets=("Waves",), tasks=("pathfinder",), attentions=("primal",), **sizes)
    found = run_primal(series, tmp_path, plan, "cpu")
    assert [(row["protocol"], row["variant"]) for row in found.series] == [(name, "default") for name in PROTOCOLS]
    assert [row["variant"] for row in found.ablation] == list(VARIANTS)
    assert [(row["task"], row["attention"]) for row in found.arena] == [("pathfinder", "primal")]
    assert [row["task"] for row in found.speed] == ["pathfinder"]


@pytest.mark.slow
def test_the_command_takes_primal_attention_apart_once(series, tmp_path):
    out, results = tmp_path / "out", tmp_path / "out" / "results"
    sizes = "--dataset Waves --seed 0 --seed 1 --width 16 --epochs 1 --device cpu --force"
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--out", str(out)]
    arguments = ["study", "primal", "--part", "ablation", "--data", str(series), *sizes.split(), *files]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "ablations of primal attention: test accuracy, validation split, mean of 2 seeds" in result.output
    assert all(f"Waves    {variant} " in result.output for variant in VARIANTS)
    assert "series: test accuracy" not in result.output
    found = kq.Reading.load(tmp_path / "a.json")
    assert [(row["variant"], row["seed"]) for row in found.ablation] == [(v, seed) for seed in (0, 1) for v in VARIANTS]
    assert (found.series, found.arena, found.speed) == ([], [], [])
    table = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert [(row["part"], row["variant"], row["seed"]) for row in table] == [
        ("ablation", row["variant"], str(row["seed"])) for row in found.ablation
    ]
    before = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    assert len(before) == 2 * len(VARIANTS)
    again = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert again.exit_code == 0, again.output
    assert {path.name: path.stat().st_mtime_ns for path in results.iterdir()} == before
    assert kq.Reading.load(tmp_path / "a.json").ablation == found.ablation  # their seconds too
    lost = next(results.glob("Waves-primal-held-out-ksvd-16-1-*.json"))
    marked = next(results.glob("Waves-primal-held-out-causal-16-0-*.json"))
    lost.unlink()
    marked.write_text(json.dumps({**json.loads(marked.read_text()), "accuracy": 0.125}))
    third = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert third.exit_code == 0, third.output
    assert lost.exists()  # only what is missing is trained
    assert [row["accuracy"] for row in kq.Reading.load(tmp_path / "a.json").ablation].count(0.125) == 1


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
