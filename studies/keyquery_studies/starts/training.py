"""Many starts trained side by side: rates and seeds differ, everything else is shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.support.files import write_text
from keyquery.training import schedule
from keyquery_studies.common.language_models import tasks
from keyquery_studies.common.objectives import Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.stacked import Adam, Weights, stacked
from keyquery_studies.common.store import checkpoint_path, digest_of
from keyquery_studies.starts.model import StartRun, losses

CHECKS = 40  # evaluations during a training
KEPT = 8  # checkpoints during a training, each of which replaces the last
WARMUP, DECAY, CLIP = 300, 0.1, 1.0
DRAWN = 50  # steps whose windows are drawn at once
EAGER = 3  # steps before a CUDA graph is captured
Late = Callable[[], bool]


class Together:
    """Models of one objective and one number of steps, trained side by side.

    Models of one seed see the same windows. On a GPU a whole step is one CUDA graph.
    """

    def __init__(self, runs: Sequence[StartRun], folder: Path, device: str) -> None:
        self.runs, self.run, self.device = runs, runs[0], device
        self.task, self.exam = tasks(folder, device, self.run.objective, self.run.length, batch=self.run.batch)
        self.seeds = sorted({own.seed for own in runs})
        self.of_seed = torch.tensor([self.seeds.index(own.seed) for own in runs], device=device)
        self.weights = stacked([own.initial() for own in runs], device)
        decays = [
            name for name, w in self.weights.items() if w.ndim > 2 and "tokens" not in name and "places" not in name
        ]
        self.optimiser = Adam(self.weights, decays, DECAY, CLIP)
        self.best = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.lowest = torch.full((len(runs),), torch.inf, device=device)
        self.best_step = torch.zeros(len(runs), device=device)
        self.curve: list[list[float]] = []
        self.step = 0
        self.base = torch.tensor([own.lr for own in runs], device=device)
        self.rates = torch.zeros_like(self.base)
        sizes = (len(self.seeds), self.run.batch, self.run.length)
        self.inputs, self.targets = (torch.zeros(sizes, dtype=torch.long, device=device) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None
        digest = digest_of(json.dumps([asdict(own) for own in runs], sort_keys=True), length=10)
        self.kept = checkpoint_path(folder, f"{self.run.objective.replace(' ', '-')}-{self.run.steps}-{digest}")

    def train(self, late: Late) -> bool:
        """Train to the end, or until `late`, after which it is resumed from its last checkpoint; whether it ended."""
        self._resume()
        steps, every = self.run.steps, max(self.run.steps // CHECKS, 1)
        inputs, targets = self._draw(self.step // DRAWN)
        while self.step < steps:
            within = self.step % DRAWN
            if not within and self.step:
                inputs, targets = self._draw(self.step // DRAWN)
            self.inputs.copy_(inputs[:, within])
            self.targets.copy_(targets[:, within])
            torch.mul(self.base, schedule("cosine", self.step, steps, min(WARMUP, steps // 4)), out=self.rates)
            self._advance()
            self.step += 1
            if self.step % every == 0:
                self._check()
                if self.step % max(every * (CHECKS // KEPT), 1) == 0:
                    self._keep()
                if late():
                    break
        return self.step == steps

    def _draw(self, chunk: int) -> tuple[Tensor, Tensor]:
        """The windows of `DRAWN` steps, (seeds, steps, batch, n), from one CPU generator per seed and chunk."""
        drawn = []
        for seed in self.seeds:
            generator = torch.Generator().manual_seed((seed * 1_000_003 << 24) + chunk)
            drawn.append(self.task.draw_many(DRAWN, generator))
        inputs, targets = (torch.stack(each) for each in zip(*drawn, strict=True))
        return inputs, targets

    def _advance(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.device.startswith("cuda") and self.step == self.begun + EAGER:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._update()
            self.graph.replay()  # a capture runs nothing
        elif self.device.startswith("cuda"):  # a capture needs steps on another stream before it
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._update()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._update()

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
        print(self.run.objective, self.step, "of", self.run.steps, f"{values.nanmean().item():.3f}", flush=True)

    def _keep(self) -> None:
        state = {"weights": self.weights, "best": self.best, "optimiser": self.optimiser.state(), "step": self.step}
        state |= {"lowest": self.lowest, "best_step": self.best_step, "curve": self.curve}
        torch.save(state, self.kept.with_suffix(".new"))
        self.kept.with_suffix(".new").replace(self.kept)
        write_text(self.kept.with_suffix(".json"), json.dumps(self.rows()) + "\n")

    def _resume(self) -> None:
        if self.kept.exists():
            state = torch.load(self.kept, map_location=self.device, weights_only=True)
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(state["weights"][name])
            self.optimiser.load(state["optimiser"])
            self.best, self.step, self.curve = state["best"], state["step"], state["curve"]
            self.lowest, self.best_step = state["lowest"], state["best_step"]
        self.begun = self.step

    def rows(self) -> list[dict[str, Any]]:
        """One row per model; test losses are those of the weights with the lowest validation loss."""
        tested = evaluated(self.best, self.run, self.exam).tolist()
        return [
            {
                **asdict(own),
                "partial": self.step < self.run.steps,
                "loss": tested[index],
                "validation": self.lowest[index].item(),
                "best_step": int(self.best_step[index]),
                "curve": [[int(row[0]), row[1 + index]] for row in self.curve],
                "tokens": len(self.task.ids),
                "parameters": sum(weight[index].numel() for weight in self.weights.values()),
                "device": device_name(self.device),
            }
            for index, own in enumerate(self.runs)
        ]


@torch.no_grad()
def evaluated(weights: Weights, run: StartRun, task: Task) -> Tensor:
    """The loss of every model on held-out text."""
    models, batches = len(weights["tokens.weight"]), []
    for inputs, targets in task.held_out:
        pair = (part.expand(models, -1, -1) for part in (inputs, targets.long()))
        batches.append(losses(weights, run, *pair))
    return torch.stack(batches).mean(0)
