"""The study of masks, small: arms differ in one factor, and its differences are those of its rows."""

import io

import pytest
import torch
from keyquery_studies.mask.study import ARMS, Masks, Plan
from keyquery_studies.mask.study import run as run_mask
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.layers import LanguageModel
from keyquery.pages import terminal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_windows")]  # they train
TINY = Plan(
    seeds=(0, 1),
    rates=(1e-3,),
    windows=(4, 8),
    steps=1,
    vocabulary=300,
    width=8,
    depth=1,
    length=8,
    batch=4,
)


@pytest.fixture(scope="module")
def study(corpus, tmp_path_factory):
    return run_mask(corpus, tmp_path_factory.mktemp("out"), TINY, device="cpu")


def test_arms_differ_in_the_mask_or_in_the_objective():
    masked, causal, following = (arm for arm in TINY.arms("digest") if not arm.rope)
    assert [arm.objective for arm in (masked, causal, following)] == list(ARMS)
    assert [arm.shape().causal for arm in (masked, causal, following)] == [False, True, True]
    torch.manual_seed(0)
    model, ids = LanguageModel(causal.shape()), torch.randint(2, 300, (1, 8))
    changed = ids.clone()
    changed[0, 5] = 2
    assert torch.equal(model(ids)[:, :5], model(changed)[:, :5])  # it sees earlier tokens alone


def test_every_head_of_every_model_is_measured_in_every_window(study):
    rows = study.records()
    assert len(study.models) == 2 * len(ARMS) * 2
    assert len(rows) == len(study.models) * 2 * 4
    assert {row["window"] for row in rows} == {4, 8}
    assert {rate["lr"] for rate in study.rates} == {1e-3}


def row(objective, seed, position):
    parts = {"symmetry": 0.0, "symmetric": 1 - position, "skew": 0.0, "popularity": 0.0, "query_only": 0.0}
    head = {"window": 8, "layer": 0, "head": 0, **parts, "position": position, "interaction": 0.0}
    return {"objective": objective, "rope": False, "seed": seed, "lr": 1e-3, "loss": 1.0, "heads": [head]}


def test_changes_are_between_arms_that_differ_in_one_factor():
    shares = {"masked": (0.1, 0.2), "masked causal": (0.4, 0.6), "next token": (0.5, 0.6)}
    models = [row(objective, seed, share) for objective, pair in shares.items() for seed, share in enumerate(pair)]
    summary = {(r["factor"], r["part"]): r for r in Masks(models=models, rates=[]).summary()}
    assert summary["mask", "position"]["change"] == pytest.approx(0.35)
    assert summary["objective", "position"]["change"] == pytest.approx(0.05)
    assert summary["mask", "symmetric"]["change"] == pytest.approx(-0.35)
    half = 12.706205 * (0.05**2 * 2) ** 0.5 / 2**0.5  # t of one degree of freedom
    assert summary["mask", "position"]["high"] == pytest.approx(0.35 + half, rel=1e-5)


def test_it_is_shown_and_drawn(study):
    console = Console(width=100, file=io.StringIO())
    terminal.show(study, console)
    text = console.file.getvalue()
    assert "heads in windows of 8 tokens, mean over heads and 2 seeds" in text
    assert max(map(len, text.splitlines())) <= 100
    titles = [axis.get_title() for axis in study.plot().get_axes()]
    assert titles[:2] == ["masked, learned", "masked causal, learned"]
    again = kq.Reading.load(study.to_json())
    assert again.summary() == study.summary()


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="corpus must be a text file, or out the folder of an earlier run"):
        run_mask()
    with pytest.raises(ValueError, match=r"windows must be from 1 to 8 tokens long, got \(4, 9\)"):
        Plan(windows=(4, 9), length=8)
    with pytest.raises(ValueError, match="seeds and rates must not be empty"):
        Plan(seeds=())


@pytest.mark.slow
def test_the_command_runs(corpus, tmp_path):
    sizes = "--steps 1 --rate 0.001 --width 16 --depth 1 --length 8 --window 8 --batch 4 --vocabulary 300 --seed 3"
    files = ["--json", str(tmp_path / "a.json"), "--out", str(tmp_path)]
    arguments = ["study", "mask", "--corpus", str(corpus), *sizes.split(), "--device", "cpu", *files]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert {model["seed"] for model in kq.Reading.load(tmp_path / "a.json").models} == {3}
