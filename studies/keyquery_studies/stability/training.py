"""Trials that are trained side by side, under one monitor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.monitor import Monitor
from keyquery_studies.common.language_models import tasks
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import Store, digest_of
from keyquery_studies.stability.curves import packed
from keyquery_studies.stability.outcome import means_of, outcome
from keyquery_studies.stability.stack import StackedModel
from keyquery_studies.stability.trial import BETAS, CLIP, DECAY, LARGE, WARMUP, Trial

SAVE = 500  # steps between results of a stack that is still being trained
CHECK = 50  # steps between looks at the clock, for which the device is waited for
SILENT = Rules(growth=False, dead=False, rank=False, overflow=False)  # rules are applied to the rows


@dataclass(frozen=True)
class Stack:
    """Trials of one structure, trained side by side; then those that diverged, once more under QK-Clip.

    Its result is {"rows": one per trial}, of the steps done so far if it is partial.
    """

    trials: tuple[Trial, ...]
    tau: float | None = None  # of QK-Clip; None: nothing is trained twice
    until: float | None = None  # the time at which it is interrupted; not part of the settings

    @property
    def name(self) -> str:
        """The name of its result file."""
        first = self.trials[0]
        fixed = [WARMUP, LARGE, BETAS, DECAY, CLIP, self.tau]
        digest = digest_of(json.dumps([*fixed, *(trial.settings() for trial in self.trials)]), length=10)
        arm = "normed" if first.normed else "-".join(dict.fromkeys(trial.kernel for trial in self.trials))
        return f"{arm}-{first.depth}-{len(self.trials)}-{digest}.json"

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train all trials; rows have the loss of every step, and what the monitor recorded."""
        store, start = Store(folder / "results"), perf_counter()
        rows: list[dict[str, Any]] = []
        for again in (False, True):
            before, trials = rows, self._twins(rows) if again else self.trials
            for part in self._trained(trials, folder, device) if trials else ():
                rows = [*before, *part]
                store.write(self.name, {"rows": rows, "seconds": perf_counter() - start, "partial": True})
        late = any(row["done"] < row["steps"] for row in rows)
        return {"rows": rows, "seconds": perf_counter() - start, **({"partial": True} if late else {})}

    def _twins(self, rows: Sequence[dict[str, Any]]) -> tuple[Trial, ...]:
        """Under QK-Clip, all that diverged without; heads with QK-norm cannot be clipped."""
        names = Trial.__dataclass_fields__
        return tuple(
            Trial(**{name: row[name] for name in names} | {"tau": self.tau})
            for row in rows
            if self.tau is not None and not row["normed"] and outcome(row)["outcome"] == "diverged"
        )

    def _trained(self, trials: Sequence[Trial], folder: Path, device: str) -> Iterator[list[dict[str, Any]]]:
        """Rows of trials while they are trained, from time to time and at the end."""
        first = trials[0]
        task, _ = tasks(folder, device, "next token", first.length, batch=first.batch)
        model = StackedModel([trial.model() for trial in trials]).to(device)
        run = _Run(trials, model, Batches(task.ids, trials), device)
        with Monitor(model, first.every, rules=SILENT, strict=True) as monitor:
            for step in range(first.steps):
                run.step(step)
                if self.until is not None and step % CHECK == 0:
                    float(run.losses[-1][0])  # waits for the device
                    if time() >= self.until:
                        break
                if (step + 1) % SAVE == 0 and step + 1 < first.steps:
                    yield run.rows(monitor)
        yield run.rows(monitor)


class Batches:
    """Windows of a text, drawn anew at every step by every seed: trials of one seed see the same."""

    def __init__(self, ids: Tensor, trials: Sequence[Trial]) -> None:
        self.ids, self.length, self.batch = ids, trials[0].length, trials[0].batch
        self.seeds = sorted({trial.seed for trial in trials})
        self.owner = torch.tensor([self.seeds.index(trial.seed) for trial in trials], device=ids.device)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (runs, batch, length)."""
        starts = torch.stack(
            [
                torch.randint(
                    len(self.ids) - self.length,
                    (self.batch,),
                    generator=torch.Generator().manual_seed(step + 1_000_003 * seed),
                )
                for seed in self.seeds
            ]
        ).to(self.ids.device, non_blocking=True)
        windows = self.ids[starts[..., None] + torch.arange(self.length + 1, device=self.ids.device)].long()
        of_runs = windows[self.owner]
        return of_runs[..., :-1], of_runs[..., 1:]


class _Run:
    """A stack while it is trained."""

    def __init__(self, trials: Sequence[Trial], model: StackedModel, batches: Batches, device: str) -> None:
        self.trials, self.model, self.batches, self.device = trials, model, batches, device
        options: dict[str, Any] = {"fused": True} if device != "cpu" else {}
        # Adam's step is proportional to its rate: gradients give the direction, and each run's own rate the length.
        self.optimiser = torch.optim.AdamW(model.parameters(), 1.0, BETAS, weight_decay=DECAY, **options)
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.bounds: list[Tensor] = []
        self.clips = torch.zeros(len(self.trials), dtype=torch.long, device=device)
        self.before = [weight.detach().clone() for weight in model.parameters()]
        taus = [math.inf if trial.tau is None else trial.tau for trial in self.trials]
        self.taus, self.clipped = torch.tensor(taus, device=device), min(taus) < math.inf
        short = [at for at, trial in enumerate(trials) if trial.recipe == "hold"]
        self.short = slice(min(short, default=0), max(short, default=-1) + 1)  # runs whose weights are rounded to bf16
        if len(range(*self.short.indices(len(trials)))) != len(short):
            raise ValueError("trials of the recipe 'hold' must stand side by side")

    def step(self, step: int) -> None:
        trials, model = self.trials, self.model
        recorded = step % trials[0].every == 0
        attention: Any  # a StackedAttention
        for attention in model.attention:
            attention.recorded, attention.clipped = recorded, self.clipped
        inputs, targets = self.batches.draw(step)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            logits = model(inputs)
        each = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        losses = each.view(len(trials), -1).mean(1)
        self.optimiser.zero_grad(set_to_none=True)
        losses.sum().backward()
        norms = model.gradient_norms()
        model.scale_gradients(CLIP / norms.clamp(min=CLIP))
        if recorded:
            self.bounds.append(torch.stack([cast(Any, attention).bound() for attention in model.attention]))
        self._update([trial.rate_at(step) for trial in trials])
        self.losses.append(losses.detach())
        self.gradients.append(norms)
        if self.clipped:
            for attention in model.attention:
                self.clips += attention.clip(self.taus)

    @torch.no_grad()
    def _update(self, rates: Sequence[float]) -> None:
        """A step of AdamW at rate 1, of which each run takes its own share."""
        weights = [weight.data for weight in self.model.parameters()]
        torch._foreach_copy_(self.before, weights)
        self.optimiser.step()
        share = torch.tensor(rates, device=self.device)[:, None]
        for weight, before in zip(weights, self.before, strict=True):
            new, old = (each.view(len(rates), -1) for each in (weight, before))
            torch.lerp(old, new, share, out=new)
            rounded = new[self.short]
            rounded.copy_(rounded.bfloat16())

    def rows(self, monitor: Monitor) -> list[dict[str, Any]]:
        """Rows of all trials, over the steps so far: curves by record, and the mean loss of every 10 steps."""
        losses, gradients, bounds = (
            torch.stack(each).cpu().numpy() for each in (self.losses, self.gradients, self.bounds)
        )
        records, every = monitor.recorder.records, self.trials[0].every
        shape = (len(records), len(self.model.attention), len(self.trials), self.trials[0].heads)
        largest, entropy, sink = (
            _array(records, name).reshape(shape) for name in ("largest", "relative_entropy", "sink")
        )
        clips = self.clips.tolist()
        rows = []
        for at, trial in enumerate(self.trials):
            of_run = largest[:, :, at].reshape(len(records), -1)
            curves = {"largest": of_run, "bound": bounds[:, :, at].max(1), "entropy": entropy[:, :, at].mean(-1).min(1)}
            curves["sink"] = sink[:, :, at].reshape(len(records), -1).max(1)
            if trial.tau is not None:
                curves = {"largest": of_run.max(1)}
            curves["loss"] = means_of(losses[:, at])
            curves["gradient"] = _blocks(gradients[:, at], every)
            facts = {"device": device_name(self.device), "clips": clips[at], "done": len(losses)}
            short = {name: packed(curve) for name, curve in curves.items()}
            rows.append({**trial.settings(), **facts, "curves": short})
        return rows


def _array(records: Sequence[dict[str, Any]], metric: str) -> np.ndarray:
    count = len(records[0]["values"]["largest"])
    rows = [record["values"].get(metric, [None] * count) for record in records]
    return np.array([[math.nan if v is None else v for v in row] for row in rows])


def _blocks(values: np.ndarray, every: int) -> np.ndarray:
    """Median and largest of every block of steps, from a recorded step to the next, (blocks, 2)."""
    whole = np.nan_to_num(values[: len(values) // every * every], nan=np.inf).reshape(-1, every)
    return np.stack((np.median(whole, 1), whole.max(1)), 1)
