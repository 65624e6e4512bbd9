"""Many starts trained side by side: rates and seeds differ, everything else is shared."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.support.files import write_all
from keyquery_studies.common.objectives import Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.stacked import Adam, Replayed, Weights, stacked
from keyquery_studies.common.store import Store, checkpoint_path, digest_of
from keyquery_studies.starts.model import StartRun, losses

EVERY, POINTS = 250, 200  # steps between evaluations, at least, and evaluations, at most
KEPT = 4  # evaluations between checkpoints, each of which replaces the last
FLAT = 0.8  # share of the steps at a constant rate; then it falls linearly to 0
WARMUP, DECAY, CLIP = 300, 0.1, 1.0
DIGITS = 5  # of curves
DRAWN = 50  # steps whose windows are drawn at once
Late = Callable[[], bool]


class Together:
    """Models of one objective, trained side by side for several numbers of steps.

    All share the steps at a constant rate: for each number of steps the rate falls from a branch of them. Models of
    one seed see the same windows. On a GPU a whole step is one CUDA graph.
    """

    def __init__(self, runs: Sequence[StartRun], folder: Path, device: str) -> None:
        self.runs, self.run, self.device = runs, runs[0], device
        self.task, self.exam = self.run.tasks(folder, device)
        self.seeds = sorted({own.seed for own in runs})
        self.of_seed = torch.tensor([self.seeds.index(own.seed) for own in runs], device=device)
        self.weights = stacked([own.initial() for own in runs], device)
        places = ("tokens", "places")
        kept = [name for name in self.weights if name.startswith(places) or name.endswith("gain")]
        decays = [name for name, w in self.weights.items() if w.ndim > 2 and name not in kept]
        self.optimiser = Adam(self.weights, decays, DECAY, CLIP)
        self.best = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.lowest = torch.full((len(runs),), torch.inf, device=device)
        self.best_step = torch.zeros(len(runs), device=device)
        self.curve: list[list[float]] = []
        self.step = self.begun = 0
        self.every = EVERY
        self.warmup = WARMUP
        self.base = torch.tensor([own.lr for own in runs], device=device)
        self.rates = torch.zeros_like(self.base)
        sizes = (len(self.seeds), self.run.batch, self.run.length)
        self.inputs, self.targets = (torch.zeros(sizes, dtype=torch.long, device=device) for _ in range(2))
        self.drawn: tuple[int, tuple[Tensor, Tensor] | None] = (-1, None)
        self._advance = Replayed(self._update, device)
        digest = digest_of(json.dumps([asdict(own) for own in runs], sort_keys=True), length=10)
        self.kept = checkpoint_path(folder, f"{self.run.objective.replace(' ', '-')}-{digest}")

    def train(self, budgets: Sequence[int], late: Late) -> Iterator[list[dict[str, Any]]]:
        """The rows of all models for one number of steps after the other; once `late`, no more."""
        self.warmup, self.every = min(WARMUP, min(budgets) // 4), max(EVERY, max(budgets) // POINTS)
        self._resume(round(FLAT * min(budgets)))
        for steps in sorted(budgets):
            if not self.advance(min(round(FLAT * steps), steps - 1), None, late):
                break
            branch = self.state()
            self.advance(steps, steps)
            yield self.rows(steps)
            self.load(branch)

    def advance(self, until: int, steps: int | None, late: Late = lambda: False) -> bool:
        """Train up to a step, at a constant rate or, with `steps`, at one that falls to 0; False once `late`."""
        while self.step < until:
            chunk, within = divmod(self.step, DRAWN)
            if self.drawn[0] != chunk:
                self.drawn = (chunk, self._draw(chunk))
            assert self.drawn[1] is not None
            self.inputs.copy_(self.drawn[1][0][:, within])
            self.targets.copy_(self.drawn[1][1][:, within])
            torch.mul(self.base, factor(self.step, steps, self.warmup), out=self.rates)
            self._advance()
            self.step += 1
            if self.step % self.every == 0 or self.step == steps:
                self._check()
                if steps is None and len(self.curve) % KEPT == 0:
                    self._keep()
                if late():
                    return False
        return True

    def _draw(self, chunk: int) -> tuple[Tensor, Tensor]:
        """The windows of `DRAWN` steps, (seeds, steps, batch, n), from one CPU generator per seed and chunk."""
        drawn = []
        for seed in self.seeds:
            generator = torch.Generator().manual_seed((seed * 1_000_003 << 24) + chunk)
            drawn.append(self.task.draw_many(DRAWN, generator))
        inputs, targets = (torch.stack(each) for each in zip(*drawn, strict=True))
        return inputs, targets

    def _update(self) -> None:
        cuda = self.device.startswith("cuda")
        inputs, targets = self.inputs[self.of_seed], self.targets[self.of_seed]
        with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=cuda, cache_enabled=False):
            value = losses(self.weights, self.run, inputs, targets)
        value.sum().backward()
        self.optimiser.step(self.rates)

    def _check(self) -> None:
        values = evaluated(self.weights, self.run, self.task)
        better = values < self.lowest
        self.lowest = torch.where(better, values, self.lowest)
        self.best_step = torch.where(better, self.step, self.best_step)
        for name, weight in self.weights.items():
            self.best[name][better] = weight.detach()[better]
        self.curve.append([self.step, *values.tolist()])
        print(self.run.objective, self.step, f"{values.nanmean().item():.3f}", flush=True)

    def state(self) -> dict[str, Any]:
        """A copy of all that training changes."""
        copied = {"weights": self.weights, "best": self.best}
        state = {key: {name: w.detach().clone() for name, w in group.items()} for key, group in copied.items()}
        optimiser = {key: copy.deepcopy(value) for key, value in self.optimiser.state().items()}
        facts = {"lowest": self.lowest, "best_step": self.best_step, "curve": list(self.curve), "step": self.step}
        return {**state, "optimiser": optimiser, **facts}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state`, in the same tensors: a CUDA graph knows no others."""
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
            self.best[name].copy_(state["best"][name])
        self.optimiser.load(state["optimiser"])
        self.lowest, self.best_step = state["lowest"], state["best_step"]
        self.curve, self.step = list(state["curve"]), state["step"]

    def _keep(self) -> None:
        data, kept = io.BytesIO(), self.state()
        torch.save(kept, data)
        write_all({self.kept: data.getvalue()})

    def _resume(self, most: int) -> None:
        """Continue from the checkpoint of an earlier run, unless it is beyond the first branch."""
        state = torch.load(self.kept, map_location=self.device, weights_only=True) if self.kept.exists() else {}
        known = state and state["optimiser"].keys() == self.optimiser.state().keys()  # not of an earlier version
        if known and state["step"] <= most:
            self.load(state)
        self.begun = self.step

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """One row per model; test losses are those of the weights with the lowest validation loss."""
        tested = evaluated(self.best, self.run, self.exam).tolist()
        return [
            {
                **asdict(replace(own, steps=steps)),
                "loss": tested[index],
                "validation": self.lowest[index].item(),
                "best_step": int(self.best_step[index]),
                "curve": [[int(row[0]), round(row[1 + index], DIGITS)] for row in self.curve],
                "tokens": len(self.task.ids),
                "parameters": sum(weight[index].numel() for weight in self.weights.values()),
                "device": device_name(self.device),
            }
            for index, own in enumerate(self.runs)
        ]


def trained(
    runs: Sequence[StartRun], budgets: Sequence[int], folder: Path, device: str, late: Late
) -> list[dict[str, Any]]:
    """The rows of runs for every number of steps; unless all of one are in `folder`, they are trained side by side."""
    store = Store(folder / "results")
    names = {steps: [replace(own, steps=steps).name for own in runs] for steps in sorted(budgets)}
    todo = [steps for steps in names if not all(map(store.done, names[steps]))]
    if todo and not late():
        for rows in Together([replace(own, steps=max(todo)) for own in runs], folder, device).train(todo, late):
            for name, row in zip(names[rows[0]["steps"]], rows, strict=True):
                store.write(name, row, allow_nan=True)
    return [store.read(name) for own in names.values() for name in own if store.done(name)]


def factor(step: int, steps: int | None, warmup: int) -> float:
    """The factor on the rate: linear warm-up, constant, then linear to 0 over the last fifth of `steps`, if any."""
    falling = 1.0 if steps is None else (steps - step) / ((1 - FLAT) * steps)
    return min((step + 1) / max(warmup, 1), falling, 1.0)


@torch.no_grad()
def evaluated(weights: Weights, run: StartRun, task: Task) -> Tensor:
    """The loss of every model on held-out text."""
    models, batches = len(weights["tokens.weight"]), []
    for inputs, targets in task.held_out:
        pair = (part.expand(models, -1, -1) for part in (inputs, targets.long()))
        batches.append(losses(weights, run, *pair))
    return torch.stack(batches).mean(0)
