"""Trials that are trained side by side, under one monitor."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
from keyquery_studies.common.objectives import Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import Store, digest_of
from keyquery_studies.stability.stack import StackedModel
from keyquery_studies.stability.trial import BETAS, CLIP, DECAY, LARGE, WARMUP, Trial

SAVE = 200  # steps between results of a stack that is still being trained
SILENT = Rules(growth=False, entropy=False, dead=False, rank=False, overflow=False)  # rules are applied to the rows


@dataclass(frozen=True)
class Stack:
    """Trials of one structure; its result is {"rows": one per trial}, of the steps done so far if it is partial."""

    trials: tuple[Trial, ...]
    until: float | None = None  # the time at which it is interrupted; not part of the settings

    @property
    def name(self) -> str:
        """The name of its result file."""
        first = self.trials[0]
        fixed = [WARMUP, LARGE, BETAS, DECAY, CLIP]
        digest = digest_of(json.dumps([*fixed, *(trial.settings() for trial in self.trials)]), length=10)
        arm = "normed" if first.normed else "/".join(dict.fromkeys(trial.kernel for trial in self.trials))
        return f"{arm.replace('/', '-')}-{len(self.trials)}-{digest}.json"

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train all trials; rows have the loss and gradient norm of every step, and what the monitor recorded."""
        task, _ = tasks(folder, device, "next token", self.trials[0].length, batch=self.trials[0].batch)
        model = StackedModel([trial.model() for trial in self.trials]).to(device)
        run = _Run(self, model, task, device)
        store = Store(folder / "results")
        with Monitor(model, self.trials[0].every, rules=SILENT, strict=True) as monitor:
            for step in range(self.trials[0].steps):
                run.step(step, monitor)
                if self.until is not None and time() >= self.until:
                    break
                if (step + 1) % SAVE == 0:
                    store.write(self.name, run.result(monitor))
        return run.result(monitor)


class _Run:
    """A stack while it is trained."""

    def __init__(self, stack: Stack, model: StackedModel, task: Task, device: str) -> None:
        self.trials, self.model, self.task, self.device = stack.trials, model, task, device
        options: dict[str, Any] = {"fused": True} if device != "cpu" else {}
        # Adam's step is proportional to its rate: gradients give the direction, and each run's own rate the length.
        self.optimiser = torch.optim.AdamW(model.parameters(), 1.0, BETAS, weight_decay=DECAY, **options)
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.bounds: list[Tensor] = []
        self.clips = np.zeros(len(self.trials), int)
        self.start = perf_counter()
        taus = [math.inf if trial.tau is None else trial.tau for trial in self.trials]
        self.taus = torch.tensor(taus, dtype=torch.float64, device=device)
        self.short = torch.tensor(
            [trial.recipe == "abrupt" and device != "cpu" for trial in self.trials], device=device
        )

    def step(self, step: int, monitor: Monitor) -> None:
        trials, model = self.trials, self.model
        inputs, targets = self.task.draw(step, torch.Generator().manual_seed(step))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            logits = model(inputs)
        flat = targets.flatten().expand(len(trials), -1)
        losses = (
            cross_entropy(logits.float().flatten(0, 1), flat.flatten(), reduction="none").view(len(trials), -1).mean(1)
        )
        self.optimiser.zero_grad(set_to_none=True)
        losses.sum().backward()
        norms = model.gradient_norms()
        model.scale_gradients(CLIP / norms.clamp(min=CLIP))
        if step % trials[0].every == 0:
            self.bounds.append(torch.stack([cast(Any, attention).bound() for attention in model.attention]).amax(0))
        self._update([trial.rate_at(step) for trial in trials])
        self.losses.append(losses.detach())
        self.gradients.append(norms)
        if step % trials[0].every == 0 and torch.isfinite(self.taus).any():
            self._clip(monitor)

    @torch.no_grad()
    def _update(self, rates: Sequence[float]) -> None:
        """A step of AdamW at rate 1, of which each run takes its own share."""
        before = [weight.detach().clone() for weight in self.model.parameters()]
        self.optimiser.step()
        share = torch.tensor(rates, device=self.device)
        for weight, old in zip(self.model.parameters(), before, strict=True):
            new, last = (t.view(len(rates), -1) for t in (weight.data, old))
            new.sub_(last).mul_(share[:, None]).add_(last)
            new.copy_(torch.where(self.short[:, None], new.bfloat16().float(), new))

    def _clip(self, monitor: Monitor) -> None:
        largest = monitor.recorder.latest("largest").reshape(len(self.model.attention), len(self.trials), -1)
        attention: Any  # a StackedAttention
        for attention, values in zip(self.model.attention, torch.from_numpy(largest), strict=True):
            gamma = torch.where(values > self.taus.cpu()[:, None], self.taus.cpu()[:, None] / values, 1.0)
            self.clips += (gamma < 1).sum(1).numpy()
            attention.clip(gamma.float().to(self.device))

    def result(self, monitor: Monitor) -> dict[str, Any]:
        """Rows of all trials, over the steps so far."""
        losses, gradients, bounds = (
            torch.stack(each).cpu().numpy() for each in (self.losses, self.gradients, self.bounds)
        )
        records = monitor.recorder.records
        shape = (len(records), len(self.model.attention), len(self.trials), self.trials[0].heads)
        largest, entropy, sink = (
            _array(records, name).reshape(shape) for name in ("largest", "relative_entropy", "sink")
        )
        rows = []
        for at, trial in enumerate(self.trials):
            of_run = largest[:, :, at].reshape(len(records), -1)
            curves = {"largest": [_short(values) for values in of_run], "bound": _short(bounds[:, at])}
            curves["entropy"] = [_short(values) for values in entropy[:, :, at].mean(-1)]
            curves["sink"] = _short(sink[:, :, at].reshape(len(records), -1).max(1))
            facts = {"device": device_name(self.device), "clips": int(self.clips[at])}
            steps = {"recorded": [record["step"] for record in records], "done": len(losses)}
            rows.append({**trial.settings(), **facts, **steps, **curves,
                         "loss": _short(losses[:, at]), "gradient": _short(gradients[:, at])})  # fmt: skip
        result: dict[str, Any] = {"rows": rows, "seconds": perf_counter() - self.start}
        return result if len(losses) == self.trials[0].steps else {**result, "partial": True}


def _array(records: Sequence[dict[str, Any]], metric: str) -> np.ndarray:
    return np.array([[math.nan if v is None else v for v in record["values"][metric]] for record in records])


def _short(values: Any) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
