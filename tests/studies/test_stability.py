"""The study of stability: runs side by side equal single ones, and rules and outcomes are what they are said to be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from keyquery_studies.stability.curves import packed, unpacked
from keyquery_studies.stability.outcome import means_of, outcome
from keyquery_studies.stability.stack import StackedModel
from keyquery_studies.stability.study import Plan, run
from keyquery_studies.stability.training import Batches, _Run
from keyquery_studies.stability.trial import KERNELS, Trial
from keyquery_studies.stability.warning import Rule, Watched, fit, judged, predicted
from torch.nn.functional import cross_entropy

import keyquery as kq
from keyquery.instruments.monitor.alarms import Rules

SIZE = {"text": "", "vocabulary": 40, "width": 16, "depth": 2, "heads": 2, "length": 8, "batch": 3, "steps": 8}
ARMS = [*({"kernel": kernel} for kernel in KERNELS), {"normed": True}]


def pair(recipe: str = "ramp", rate: float = 0.02, **arm: object) -> list[Trial]:
    return [Trial(recipe=recipe, rate=rate * (1 + seed), seed=seed, **SIZE, **arm) for seed in (0, 1)]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_runs_side_by_side_equal_single_ones(arm: dict[str, object]) -> None:
    trials, ids = pair(**arm), torch.randint(40, (400,), generator=torch.Generator().manual_seed(0))
    batches = Batches(ids, trials)
    together = _Run(trials, StackedModel([trial.model() for trial in trials]), batches, "cpu")
    for step in range(3):
        together.step(step)
    for index, trial in enumerate(trials):
        model = trial.model()
        optimiser = torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.95), weight_decay=0.0)
        for step in range(3):
            inputs, targets = (part[index] for part in batches.draw(step))
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            torch.testing.assert_close(together.losses[step][index], loss.detach(), rtol=2e-4, atol=2e-4)
            optimiser.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.testing.assert_close(together.gradients[step][index], norm, rtol=5e-3, atol=1e-4)
            optimiser.param_groups[0]["lr"] = trial.rate * (step + 1) / trial.steps
            optimiser.step()


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("recipe", ["ramp", "hold"])
def test_bounds_hold_and_are_those_of_the_library(recipe: str, arm: dict[str, object]) -> None:
    trials = pair(recipe, **arm)
    model = StackedModel([trial.model() for trial in trials])
    for attention in model.attention:
        attention.recorded = attention.clipped = True
    model(torch.randint(40, (2, 3, 8), generator=torch.Generator().manual_seed(1)))
    for attention in model.attention:
        assert (attention.largest.amax(1) <= attention.bound() * (1 + 1e-6)).all()
    if arm == {"kernel": "general"}:
        from keyquery.instruments.monitor.bound import logit_bounds

        for index, trial in enumerate(trials):
            for layer, attention in zip(kq.read(trial.model()), model.attention, strict=True):
                expected = logit_bounds({"": layer}, {"": attention.norm[index]})[""].bound.max()
                torch.testing.assert_close(attention.bound()[index].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_clip_brings_logits_to_tau_and_leaves_other_runs_alone(kernel: str) -> None:
    trials = pair("hold", kernel=kernel)
    model = StackedModel([trial.model() for trial in trials])
    ids = torch.randint(40, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    first = model.attention[0]
    first.clipped = True
    before = model(ids)
    largest = first.largest.clone()
    tau = torch.stack((largest[0].max() / 3, torch.tensor(torch.inf)))
    counts = first.clip(tau)
    after = model(ids)
    assert counts.tolist() == [int((largest[0] > tau[0]).sum()), 0]
    torch.testing.assert_close(first.largest[0], largest[0].clamp(max=float(tau[0])), rtol=1e-5, atol=1e-6)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_a_clip_leaves_heads_without_positive_or_finite_logits_alone() -> None:
    attention = StackedModel([trial.model() for trial in pair()]).attention[0]
    weights = [weight.clone() for weight in attention.parameters()]
    attention.largest = torch.tensor([[-5.0, torch.nan], [-1e9, 3.0]])
    assert attention.clip(torch.tensor([4.0, 4.0])).tolist() == [0, 0]
    assert all(map(torch.equal, weights, attention.parameters()))


def test_packed_curves_keep_their_numbers() -> None:
    values = np.random.default_rng(0).normal(size=(50, 3)) * 10.0 ** np.arange(-20, 30)[:, None]
    values[3], values[4, 0] = np.nan, np.inf
    back = unpacked(packed(values))
    assert np.isnan(back[3]).all()
    assert back[4, 0] == np.inf
    finite = np.isfinite(values)
    assert np.abs(back[finite] / values[finite] - 1).max() <= 1 / 4096


def row(loss: np.ndarray, largest: np.ndarray | None = None, entropy: float = 0.5) -> dict[str, object]:
    records = len(loss) // 10
    largest = np.ones((records, 2)) if largest is None else largest
    curves = {
        "loss": means_of(loss),
        "largest": largest,
        "bound": 2 * largest.max(1),
        "entropy": np.full(records, entropy),
    }
    curves["gradient"] = np.ones((records, 2))
    return {"vocabulary": 40, "every": 10, "curves": {name: packed(curve) for name, curve in curves.items()}}


def test_outcomes() -> None:
    falls = np.linspace(4, 3, 1000)
    assert outcome(row(falls))["outcome"] == "stable"
    spikes = falls.copy()
    spikes[600:] += 1
    found = outcome(row(spikes))
    assert (found["outcome"], found["spike"]) == ("diverged", 600)
    assert found["lowest"] == pytest.approx(falls[590:600].mean(), abs=2e-3)
    back = falls.copy()
    back[600:650] += 1
    assert outcome(row(back))["outcome"] == "recovered"
    short = falls.copy()
    short[600:620] += 1  # shorter than a spike
    assert outcome(row(short))["outcome"] == "stable"
    lost = falls.copy()
    lost[707:] = np.nan
    assert (outcome(row(lost))["outcome"], outcome(row(lost))["spike"]) == ("diverged", 700)


def test_growth_is_predicted_and_flat_logits_are_not() -> None:
    steps = list(range(0, 400, 50))
    largest = np.stack((np.full(8, 60.0), 20 * np.exp(0.004 * np.array(steps)), np.full(8, -1.0)), 1)
    low, slope = predicted(largest, steps, 450.0)
    np.testing.assert_allclose(low, [math.log(60), math.log(20) + 0.004 * 450, -math.inf], rtol=1e-9)
    np.testing.assert_allclose(slope, [0, 0.004, 0], atol=1e-12)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, (100, 3)))
    largest = noise * np.exp(np.outer(np.arange(100) * 10, [0.002, 0.006, 0.0])) * [3, 1, 40]
    watched = Watched(row(np.full(1000, 3.0), largest), None)
    above = Rules(dead=False, rank=False, overflow=False, limit=50.0)
    first = next(10 * at for at in range(5, 100) if above.check({"largest": watched.largest[: at + 1]}))
    assert watched.first(Rule("largest logit", (50.0,))) == first
    assert watched.first(Rule("growth", (50.0, 100.0))) < first


def test_rules_are_fit_and_judged() -> None:
    grows = np.exp(np.arange(100) / 10)[:, None]  # 50 at record 40, 1,000 at 70
    loss = np.concatenate((np.full(900, 3.0), np.full(100, 9.0)))
    lost = [Watched(row(loss, grows), 900)] * 3
    stable = [Watched(row(np.full(1000, 3.0), np.full((100, 1), size)), None) for size in (1, 2, 3, 20, 400)] * 2
    result = judged(Rule("largest logit", (50.0,)), lost, stable)
    assert (result["median_warning"], result["false_alarms"]) == (500, 2)
    rule = fit("largest logit", lost, stable)
    assert rule.thresholds[0] >= 400
    assert judged(rule, lost, stable)["false_alarms"] == 0
    assert judged(Rule("gradient norm", (2.0,)), lost, stable)["warned"] == 0
    assert judged(Rule("entropy", (0.6,)), lost, stable) | {"rule": ""} == {
        "rule": "", "median_warning": 850, "warned": 3, "diverged": 3, "false_alarms": 10, "stable": 10
    }  # fmt: skip


@pytest.mark.slow
def test_a_small_study(tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text(" ".join(f"word{number % 97} and {number % 13}" for number in range(9000)))
    plan = Plan(rates=(1e-3, 3.0), edge=(3.0,), normed=(1e-3,), seeds=(0,), held_out=(1,), steps=150,
                vocabulary=300, width=16, length=16, batch=2)  # fmt: skip
    reading = run(corpus, tmp_path / "out", plan, "cpu")
    assert kq.Reading.load(reading.to_json()) == reading
    free = [row for row in reading.rows if row["tau"] is None]
    assert len(free) == 2 * 2 * (2 + 1 + 1 + 2)
    lost = [row for row in free if row["outcome"] == "diverged" and not row["normed"]]
    assert lost
    assert len(reading.rescues()) == len(lost) == len(reading.rows) - len(free)
    assert all(row["clips"] == 0 for row in free)
    assert {rule["runs"] for rule in reading.rules} == {"held out", "calibration"}
    assert run(None, tmp_path / "out", plan, "cpu").rows == reading.rows  # nothing is trained again
