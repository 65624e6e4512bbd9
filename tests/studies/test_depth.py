"""The study of depth, small: budgets are kept, rates chosen, optima found, and what was broken off goes on."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from keyquery_studies.common.objectives import SHARES
from keyquery_studies.depth.study import DepthStudy, Plan, best_rate, parabola, text_in
from keyquery_studies.depth.study import run as run_depth
from keyquery_studies.depth.trial import ShapedTraining, width_of
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.layers import LanguageModel
from keyquery.learn.depth.law import Law
from keyquery.pages import terminal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_windows")]  # they train
TINY = Plan(budgets=(2000,), depths=(1, 2), rates=(1e-3, 4e-3), seeds=(0, 1), steps=4, vocabulary=300, length=8)


@pytest.fixture(scope="module")
def study(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return run_depth(corpus, out, TINY, device="cpu"), out


def test_every_shape_of_the_plan_keeps_its_budget():
    for job in Plan(rates=(1e-3,)).first(text=""):
        shape = job.shape()
        with torch.device("meta"):
            model = LanguageModel(shape)
        held = sum(
            p.numel() for name, p in model.body.blocks.named_parameters() if name.endswith("weight") and p.ndim > 1
        )
        assert held == pytest.approx(job.budget, rel=0.05)
        assert shape.num_attention_heads * shape.head_dim == pytest.approx(shape.width, rel=0.05)
        assert shape.width < Plan().vocabulary  # embeddings bound no width
    assert len(Plan().first(text="")) == 3 * 8 * 3


def test_the_width_is_the_even_one_nearest_to_the_budget():
    for budget, layers in ((1e6, 1), (4e6, 24), (330_000, 9)):
        found = width_of(budget, layers)
        others = [abs(12 * layers * d**2 - budget) for d in range(2, 1000, 2)]
        assert found == 2 + 2 * int(np.argmin(others))


def test_everything_planned_is_trained(study):
    reading, _ = study
    assert len(reading.rows) == 2 * (2 + 1)
    assert reading.provenance["missing"] == 0
    assert all(row["loss"] < 6.2 for row in reading.rows)  # a uniform guess is 5.7
    assert {len(row["mix"]) == row["layers"] for row in reading.rows} == {True}
    assert {row["tokens"] for row in reading.rows} == {4 * 128 * 8}
    for row in reading.chosen():
        if row["seed"] == 1:
            tried = {r["rate"]: r["validation"] for r in reading.rows if r["seed"] == 0 and _place(r) == _place(row)}
            assert row["rate"] == min(tried, key=tried.get)
    again = kq.Reading.load(reading.to_json())
    assert again == reading
    assert len(again.records()) == len(again.rows)
    assert "mix" not in again.records()[0]


def _place(row):
    return row["budget"], row["layers"]


def test_shares_of_heads_are_means_over_layers(study):
    row = next(row for row in study[0].chosen() if row["layers"] == 2)
    for name in SHARES:
        assert row[name] == pytest.approx(np.mean([layer[name] for layer in row["mix"]]))
    assert sum(row[name] for name in SHARES) == pytest.approx(1)
    assert row["pairwise_symmetric"] == pytest.approx(row["symmetric"] / (row["symmetric"] + row["skew"]))
    assert 0 < row["raw_symmetric"] < 1


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_what_was_broken_off_goes_on_as_if_it_had_not_been(corpus, study, tmp_path, monkeypatch):
    plan = replace(TINY, depths=(1,))
    expected = [row for row in study[0].rows if row["layers"] == 1]
    nothing = run_depth(corpus, tmp_path, plan, "cpu", minutes=0)
    assert nothing.rows == []
    assert nothing.provenance["missing"] == len(expected) == 3
    with pytest.raises(ValueError, match="nothing to draw"):
        nothing.plot()
    assert "No shape has been trained" in shown(nothing)
    clock = iter(range(10**6))
    monkeypatch.setattr("keyquery_studies.depth.trial.time", lambda: next(clock))
    monkeypatch.setattr("keyquery_studies.depth.study.time", lambda: 0)
    some = run_depth(None, tmp_path, plan, "cpu", minutes=9 / 60)  # a training looks six times
    assert len(some.rows) == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    monkeypatch.undo()
    whole = run_depth(None, tmp_path, plan, "cpu")
    assert without_time(whole.rows) == without_time(expected)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    told = []
    run_depth(None, tmp_path, plan, "cpu", progress=lambda items, what, total: told.append(total) or items)
    assert told == []  # nothing is trained twice


def test_a_rate_that_diverges_is_told_and_not_taken(corpus, tmp_path, monkeypatch):
    own = ShapedTraining._train

    def fails_at_high_rates(self, *arguments):
        if self.rate > 2e-3:
            raise FloatingPointError("the loss is nan at step 1")
        return own(self, *arguments)

    monkeypatch.setattr(ShapedTraining, "_train", fails_at_high_rates)
    reading = run_depth(corpus, tmp_path, replace(TINY, depths=(1,)), "cpu")
    assert [(row["rate"], row["seed"]) for row in reading.rows] == [(1e-3, 0), (1e-3, 1)]
    assert [(row["rate"], row["seed"]) for row in reading.diverged] == [(4e-3, 0)]
    assert reading.provenance["missing"] == 0
    assert "Diverged: 1 of 2,000 at 0.004." in shown(reading)


def made(budget, layers, rate, seed, loss, validation=None, symmetry=0.0):
    """A row by hand."""
    parts = {"symmetric": 0.4 + symmetry, "skew": 0.4 - symmetry, "popularity": 0.2}
    mix = [{"raw_symmetry": symmetry, "symmetry": 0.0, **parts}]
    sizes = {"width": width_of(budget, layers), "parameters": budget, "steps": 1, "text": "", "mix": mix}
    place = {"budget": budget, "layers": layers, "rate": rate, "seed": seed}
    return {**place, **sizes, "loss": loss, "validation": loss if validation is None else validation}


def planted(best, depths=(1, 2, 4, 8, 16), noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        made(10**6, layers, 1e-3, s, 3 + 0.1 * math.log(layers / best) ** 2 + noise * rng.normal())
        for layers in depths
        for s in range(2)
    ]


def test_a_planted_optimum_is_found():
    (found,) = DepthStudy(rows=planted(5.0)).optima()
    assert found["layers"] == pytest.approx(5.0)
    assert (found["low"], found["high"]) == pytest.approx((5.0, 5.0), rel=1e-4)
    assert found["best"] == 4
    assert found["law"] == pytest.approx(Law().layers(1e6))
    assert DepthStudy(rows=planted(40.0)).optima()[0]["layers"] is None  # beyond all depths
    hollow = [made(10**6, layers, 1e-3, 0, -abs(math.log(layers) - 1)) for layers in (1, 2, 4, 8)]
    assert DepthStudy(rows=hollow).optima()[0]["layers"] is None  # opens downwards


def test_the_interval_of_an_optimum_holds_it_as_often_as_it_says():
    hits = 0
    for seed in range(200):
        (found,) = DepthStudy(rows=planted(4.0, noise=0.005, seed=seed)).optima()
        hits += found["low"] <= 4.0 <= found["high"]
    assert 180 <= hits <= 199


def test_a_parabola_is_numpys():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=9), rng.normal(size=9) ** 2
    y = y + 3 * (x - 0.5) ** 2
    c, covariance = np.polyfit(x, y, 2, cov=True)
    found = parabola(x.tolist(), y.tolist())
    assert found["lowest"] == pytest.approx(-c[1] / (2 * c[0]))
    slope = np.array([c[1] / (2 * c[0] ** 2), -1 / (2 * c[0]), 0.0])
    assert found["error"] == pytest.approx(math.sqrt(slope @ covariance @ slope))
    assert parabola([0, 1, 1], [1, 2, 3]) is None
    assert parabola([0, 1, 2], [1, 0, 1]) is None  # nothing left to tell an error by


def test_a_trend_of_the_mix_is_found():
    rows = [made(10**6, n, 1e-3, s, 3.0, symmetry=0.05 * math.log(n)) for n in (1, 2, 4, 8) for s in (0, 1)]
    (found,) = DepthStudy(rows=rows).trends()
    assert found["pairwise_symmetric"]["change"] == pytest.approx(0.05 / 0.8)
    assert found["raw_symmetric"]["change"] == pytest.approx(0.05 / 2)
    noisy = [{**row, "mix": [{**row["mix"][0], "raw_symmetry": 0.1 * (i % 3)}]} for i, row in enumerate(rows)]
    (found,) = DepthStudy(rows=noisy).trends()
    x, y = [math.log(row["layers"]) for row in noisy], [(1 + row["mix"][0]["raw_symmetry"]) / 2 for row in noisy]
    c, covariance = np.polyfit(x, y, 1, cov=True)
    interval = found["raw_symmetric"]
    assert interval["change"] == pytest.approx(c[0])
    assert interval["high"] - interval["low"] == pytest.approx(2 * 2.446912 * math.sqrt(covariance[0, 0]), rel=1e-4)


def test_rates_are_chosen_by_text_that_is_not_the_exam():
    rows = [
        made(10**6, 1, 1e-3, 0, loss=3.0, validation=4.1),
        made(10**6, 1, 2e-3, 0, loss=3.5, validation=4.0),
        made(10**6, 1, 4e-3, 0, loss=2.0, validation=4.2),
        made(10**6, 1, 2e-3, 1, loss=3.7, validation=4.3),
    ]
    assert best_rate(rows) == 2e-3
    (row,) = DepthStudy(rows=rows).summary()
    assert (row["rate"], row["seeds"], row["edge"]) == (2e-3, 2, False)
    assert row["loss"] == pytest.approx(3.6)
    assert DepthStudy(rows=rows[:2]).summary()[0]["edge"] is True


def test_runs_made_apart_are_joined(study):
    first, then = (DepthStudy(rows=[r for r in study[0].rows if r["seed"] == s]) for s in (0, 1))
    assert DepthStudy.joined(first, then, first).summary() == study[0].summary()


def shown(reading):
    page = io.StringIO()
    terminal.show(reading, Console(width=100, file=page))
    return page.getvalue()


def test_tables_fit_the_terminal(study):
    text = shown(study[0])
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "2,000 parameters: best of those tried" in text
    assert "the law predicts" in " ".join(text.split())
    assert "not done yet" not in text
    planted_one = shown(DepthStudy(rows=planted(5.0)))
    assert (
        "1 million parameters: best of those tried 4 layers; the parabola's minimum is at 5.0 (5.0 to 5.0)"
        in planted_one
    )


def test_the_picture_has_three_panels():
    figure = DepthStudy(rows=planted(5.0)).plot()
    losses, optima, mix = figure.axes
    assert [axis.get_title() for axis in figure.axes] == [
        "loss minus the best of each size",
        "best depth (hollow: best trained)",
        "symmetric share of the heads",
    ]
    law = optima.get_lines()[0]
    assert law.get_ydata() == pytest.approx([Law().layers(params) for params in law.get_xdata()])
    curve = losses.get_lines()[-1]
    assert curve.get_xdata()[np.argmin(curve.get_ydata())] == pytest.approx(5.0, rel=0.03)
    assert [text.get_text() for text in mix.get_xticklabels()] == ["1", "2", "4", "8", "16"]


def test_the_text_of_a_folder(tmp_path):
    with pytest.raises(ValueError, match="holds none: name the file"):
        text_in(tmp_path)
    for name in ("a.txt", "notes.md"):
        (tmp_path / name).write_text("a")
    assert text_in(tmp_path) == text_in(tmp_path / "a.txt") == tmp_path / "a.txt"
    (tmp_path / "b.txt.xz").write_text("b")
    with pytest.raises(ValueError, match=r"holds a.txt, b.txt.xz: name the file"):
        text_in(tmp_path)
    (tmp_path / "Books_of_all.txt.xz").write_text("b")
    assert text_in(tmp_path).name == "Books_of_all.txt.xz"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"budgets": (0,)}, "budget must be at least 1, got 0"),
        ({"depths": (0,)}, "layers must be at least 1, got 0"),
        ({"rates": (0.0,)}, "rate must be above 0, got 0.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seeds": ()}, "seeds must name at least one"),
    ],
)
def test_plans_that_cannot_be_are_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        Plan(**plan)


def test_what_cannot_be_trained_is_told(tmp_path, corpus):
    with pytest.raises(ValueError, match="data must be a text file, or a folder with one"):
        run_depth()
    with pytest.raises(ValueError, match="minutes needs out: interrupted trainings would be lost"):
        run_depth(corpus, minutes=1)
    with pytest.raises(ValueError, match="minutes must be at least 0, got -1"):
        run_depth(corpus, tmp_path, minutes=-1)
    with pytest.raises(ValueError, match="has no tokens of an earlier run"):
        run_depth(None, tmp_path, TINY)


def test_names_tell_settings_and_neither_time_nor_compiling():
    one = ShapedTraining(budget=2000, layers=2, rate=1e-3, seed=0, steps=2, text="a", vocabulary=300)
    assert one.name.startswith("2000-2-0.001-0-")
    assert one.name == replace(one, until=5.0, compiled=True).name
    assert one.name != replace(one, steps=3).name


def test_the_command(corpus, tmp_path):
    sizes = (
        "--budget 2000 --layers 1 --layers 2 --rate 1e-3 --seed 3 --steps 2 --length 8 --vocabulary 300 --device cpu"
    )
    files = ["--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "out"), "--workers", "1"]
    done = CliRunner().invoke(cli.app, ["study", "depth", "--data", str(corpus.parent), *sizes.split(), *files])
    assert done.exit_code == 0, done.output
    assert [(row["layers"], row["seed"]) for row in kq.Reading.load(tmp_path / "a.json").rows] == [(2, 3), (1, 3)]
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["vocabulary"] == 300


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled_blocks_learn_the_same(corpus, tmp_path, monkeypatch):
    traced, own = [], torch.nn.Module.compile

    def compile_by_eager(module):  # the tracer without the compiler behind it, which takes a minute
        traced.append(type(module).__name__)
        own(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_eager)
    plan = Plan(budgets=(2000,), depths=(2,), rates=(1e-3,), seeds=(0,), steps=3, vocabulary=300, length=8)
    plain, compiled = (run_depth(corpus, tmp_path / str(c), plan, "cpu", compiled=c).rows[0] for c in (False, True))
    assert traced == ["Block", "Block"]
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-6)
