"""Models side by side against single ones."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch
from keyquery_studies.common.language_models import prepare
from keyquery_studies.common.stacked import Adam, stacked
from keyquery_studies.kernels.longer import KernelRun
from keyquery_studies.starts import training
from keyquery_studies.starts.model import KERNELS, StartRun, losses
from keyquery_studies.starts.study import FACTORS, Plan, Starts, run
from keyquery_studies.starts.training import Together
from torch.nn.functional import cross_entropy

from keyquery.layers import Attention, LanguageModel, Shape
from keyquery.pages import picture_bytes


def test_adam_with_a_rate_per_model() -> None:
    """Two models of two weights, of which one decays, against an optimiser of each; one is saved and continued."""
    starts, rates = {"weight": torch.randn(2, 3, 4), "bias": torch.randn(2, 3)}, [1e-2, 0.1]
    together = {name: start.clone().requires_grad_() for name, start in starts.items()}
    singles = [{name: start[row].clone().requires_grad_() for name, start in starts.items()} for row in range(2)]
    ours = Adam(together, ["weight"], decay=0.1, clip=1.0)
    theirs = [
        torch.optim.AdamW([{"params": own["weight"]}, {"params": own["bias"], "weight_decay": 0.0}], rate, (0.9, 0.98))
        for own, rate in zip(singles, rates, strict=True)
    ]
    for optimiser in theirs:
        optimiser.param_groups[0]["weight_decay"] = 0.1
    for step in range(6):
        if step == 3:  # in the same tensors, as from a checkpoint
            state = {name: value.clone() for name, value in ours.state().items()}
            ours.mean.zero_()
            ours.load(state)
        sum((weight**3).sum() for weight in together.values()).backward()
        ours.step(torch.tensor(rates))
        for own, optimiser in zip(singles, theirs, strict=True):
            optimiser.zero_grad()
            sum((weight**3).sum() for weight in own.values()).backward()
            torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
            optimiser.step()
    for name, weight in together.items():
        torch.testing.assert_close(weight, torch.stack([own[name] for own in singles]))


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("objective", ["masked", "next token"])
def test_stacked_language_models_equal_single_ones(objective: str, kernel: str, rope: bool) -> None:
    options = {"objective": objective, "lr": 1e-3, "text": "", "vocabulary": 40, "width": 16, "length": 8, "heads": 2}
    starts = (("tied", 0), ("small tied", 1)) if kernel == "general" else (("default", 0), ("default", 1))
    runs = [KernelRun(start=start, seed=seed, kernel=kernel, rope=rope, **options) for start, seed in starts]
    states = [run.initial() for run in runs]
    for state in states:
        for name, weight in state.items():
            if name.endswith("gain"):
                weight.uniform_(-1.0, 2.0)
    weights = stacked(states, "cpu")
    inputs, targets = torch.randint(40, (2, 2, 3, 8), generator=torch.Generator().manual_seed(0))
    targets[0, 0, :5] = -100
    together = losses(weights, runs[0], inputs, targets)
    together.sum().backward()
    shape = Shape(40, 16, 2, 2, 8, causal=objective == "next token", kernel=kernel, rope=rope)
    for index, state in enumerate(states):
        model = LanguageModel(shape)
        model.load_state_dict(state)
        single = cross_entropy(model(inputs[index]).flatten(0, 1), targets[index].flatten())
        single.backward()
        torch.testing.assert_close(together[index], single)
        for name, weight in model.named_parameters():
            assert weights[name].grad is not None
            torch.testing.assert_close(weights[name].grad[index], weight.grad, atol=1e-5, rtol=1e-4)


OPTIONS = {"objective": "masked", "text": "", "vocabulary": 300, "width": 16, "length": 8, "heads": 2, "batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starts")
    corpus = folder / "text.txt"
    corpus.write_text(" ".join(f"word{number % 97} and {number % 13}" for number in range(9000)))
    prepare(corpus, folder, 300)
    return folder


@pytest.mark.slow
def test_a_branch_equals_a_training_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVERY", 5)
    monkeypatch.setattr(training, "WARMUP", 2)
    runs = [StartRun(start=start, seed=seed, lr=4e-3, **OPTIONS) for start, seed in (("tied", 0), ("small", 1))]
    shorter, longer = Together(runs, folder, "cpu").train((10, 60), lambda: False)
    for path in (folder / "checkpoints").glob("*"):
        path.unlink()
    assert list(Together(runs, folder, "cpu").train((60,), lambda: False)) == [longer]
    assert [row["steps"] for row in (*shorter, *longer)] == [10, 10, 60, 60]
    assert [point[0] for point in longer[0]["curve"]] == [*range(5, 61, 5)]


@pytest.mark.slow
def test_a_late_training_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVERY", 5)
    monkeypatch.setattr(training, "KEPT", 1)
    runs = [StartRun(start="small tied", seed=2, lr=4e-3, **OPTIONS)]
    (whole,) = Together(runs, folder, "cpu").train((30,), lambda: False)
    for path in (folder / "checkpoints").glob("*"):
        path.unlink()
    assert not list(Together(runs, folder, "cpu").train((30,), lambda: True))
    again = Together(runs, folder, "cpu")
    assert list(again.train((30,), lambda: False)) == [whole]
    assert again.begun == 5


def test_small_starts_differ_in_the_tie_alone() -> None:
    small, tied = (StartRun(start=start, seed=0, lr=1e-3, **OPTIONS) for start in ("small", "small tied"))
    norms = []
    for own in (small, tied):
        model = LanguageModel(Shape(300, 16, 2, 2, 8, causal=False))
        model.load_state_dict(own.initial())
        norms.append([layer.form().norm2 for layer in model.modules() if isinstance(layer, Attention)])
        symmetry = [layer.form().symmetry for layer in model.modules() if isinstance(layer, Attention)]
    torch.testing.assert_close(norms[0], norms[1])
    assert min(value.min() for value in symmetry) > 1 - 1e-6


@pytest.mark.slow
def test_starts_are_trained_and_compared(tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text(" ".join(f"word{number % 97} and {number % 13}" for number in range(9000)))
    reading = run(corpus, tmp_path / "out", Plan(seeds=(0, 1), objectives=("masked",), steps=(2,), vocabulary=300))
    factors = {row["factor"]: row for row in reading.summary()}
    assert set(factors) == set(FACTORS)
    row, one, other = (
        factors["tie at the small scale"],
        *({r["seed"]: r["loss"] for r in reading.best("masked", start, 2)} for start in ("small tied", "small")),
    )
    assert row["change"] == pytest.approx(sum(one[seed] - other[seed] for seed in (0, 1)) / 2)


def test_separate_runs_are_joined() -> None:
    rows = [
        {**asdict(StartRun(start="small", seed=seed, lr=1e-3, **OPTIONS)), "loss": float(seed)} for seed in (0, 1, 2)
    ]
    parts = [
        Starts(models=own, provenance={"rows": len(own)}) for own in (rows[:2], [{**rows[1], "loss": 9.0}, rows[2]])
    ]
    both = Starts.joined(*parts)
    assert both.models == rows
    assert both.provenance["runs"] == [{"rows": 2}, {"rows": 2}]


def test_effects_of_known_sizes_are_found() -> None:
    """Losses with known effects of tie and scale, and a shorter budget that is .5 worse."""
    effects = {"default": 0.0, "tied": -0.4, "matched": -0.1, "small": 0.3, "small tied": 0.1}
    rows = []
    for objective, (start, effect), lr, seed, steps in product(
        ("masked", "next token"), effects.items(), (1e-3, 2e-3, 4e-3), range(3), (100, 400)
    ):
        noise = 1e-4 * steps * (1.5 + 10 * effect) * ((seed + steps) % 3 - 1)  # of mean 0 over seeds
        loss = 4.0 + effect + noise + 200 * abs(lr - 2e-3) + (0.5 if steps == 100 else 0.0)
        curve = [[steps // 2, loss + 1.0], [steps, loss]]
        own = {"objective": objective, "start": start, "lr": lr, "seed": seed, "steps": steps}
        rows.append({**own, "loss": loss, "validation": loss, "curve": curve})
    reading = Starts(models=rows, provenance={})
    found = {(row["objective"], row["steps"], row["factor"]): row for row in reading.summary()}
    assert len(found) == 2 * 2 * len(FACTORS)
    expected = {"tie at the default scale": -0.1, "tie at the small scale": -0.2, "small scale, untied": 0.3}
    expected |= {"small scale, tied": 0.2, "tie as published": -0.4}
    for (_, _, factor), row in found.items():
        assert row["change"] == pytest.approx(expected[factor])
        assert row["seeds"] == 3
    assert {row["lr"] for row in reading.starts()} == {2e-3}
    assert not any(row["edge"] for row in reading.starts())
    assert all(row["change"] == pytest.approx(-0.5) for row in reading.longer())
    assert len(reading.longer()) == 10
    assert picture_bytes(Path("starts.svg"), reading).startswith(b"<?xml")
