"""One training of the study `stability`: a small RoPE language model under a monitor, stable or not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.monitor import Monitor
from keyquery.layers import Attention, LanguageModel, Shape
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.language_models import begin, tasks
from keyquery_studies.common.objectives import Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import result_name

KERNELS = ("general", "symmetric", "split", "tied")
RECIPES = ("rate", "abrupt")
WARMUP = 1000  # steps of the recipe "rate"
LARGE = 3.0  # factor on the initial query and key weights of the recipe "abrupt"
BETAS = (0.9, 0.95)
DECAY = 0.0  # decay times a high rate would bound the weights, and so the logits
CLIP = 1.0  # global gradient norm
LOST = 2.0  # nats above its lowest mean: a training that lost so much, for LATE steps, is not continued
LATE = 300
READ = 10  # steps between readings of losses from the device


class NormedAttention(Attention):
    """`kq.Attention` with an RMS norm of each head's queries and keys (QK-norm), before RoPE."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.query_norm, self.key_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._project(x)
        return self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype), value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training. Recipes: "rate" warms up to a learning rate and holds it, with float32 weights under bf16 autocast;
    "abrupt" has no warm-up, query and key weights 3 times as large at the start, and bf16 weights.
    """

    recipe: str
    rate: float
    seed: int
    text: str  # the digest of the corpus
    normed: bool = False
    kernel: str = "general"
    tau: float | None = None  # QK-Clip at every record
    steps: int = 2500
    vocabulary: int = 1024
    width: int = 256
    depth: int = 4
    heads: int = 4
    length: int = 128
    batch: int = 32
    every: int = 10
    until: float | None = None  # the time at which it is interrupted; not part of the settings

    def __post_init__(self) -> None:
        check_choice("recipe", self.recipe, RECIPES)
        check_choice("kernel", self.kernel, KERNELS)
        for name in ("steps", "width", "depth", "heads", "length", "batch", "every"):
            check_count(name, getattr(self, name))

    @property
    def name(self) -> str:
        """The name of its result file."""
        arm = "normed" if self.normed else self.kernel
        clip = "free" if self.tau is None else f"tau{self.tau:g}"
        fixed = {"warmup": WARMUP, "large": LARGE, "betas": BETAS, "decay": DECAY, "clip": CLIP}
        return result_name((self.recipe, self.rate, arm, clip, self.seed), {**self._settings(), **fixed})

    def _settings(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "until"}

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train under a monitor; the row has the loss and gradient norm of every step, and the monitor's records."""
        if self._late():
            return {**self._settings(), "partial": True}
        task, _ = tasks(folder, device, "next token", self.length, batch=self.batch)
        short = device != "cpu"  # many CPUs have no bf16 products: there all is float32
        model = self.model().to(device, torch.bfloat16 if short and self.recipe == "abrupt" else None)
        clock, start = Clock(self), perf_counter()
        monitor = Monitor(model, self.every, structure=10**6, rules=Rules(), on_alarm=clock.alarms.append, strict=True)
        with monitor:
            self._train(model, task, monitor, clock, device)
        if clock.step < self.steps and not clock.lost:
            return {**self._settings(), "partial": True}
        model.eval()
        with torch.autocast(device, torch.bfloat16, enabled=short):
            validation = task.validate(model)
        return {
            **self._settings(),
            "device": device_name(device),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "seconds": perf_counter() - start,
            "loss": _short(clock.losses),
            "gradient": _short(clock.gradients),
            "validation": validation if math.isfinite(validation) else None,
            **_curves(monitor),
            "alarms": [{key: alarm[key] for key in ("step", "rule", "head", "value")} for alarm in clock.alarms],
            "clips": sum(len(record.get("clips", ())) for record in monitor.recorder.records),
        }

    def model(self) -> LanguageModel:
        """The model before training."""
        torch.manual_seed(self.seed)
        kernel = "general" if self.kernel == "tied" else self.kernel
        shape = Shape(self.vocabulary, self.width, self.depth, self.heads, self.length, True, kernel, rope=True)
        model = LanguageModel(shape)
        if self.kernel == "tied":
            begin(model, "matched")
        if self.normed:
            for block in model.body.blocks:
                old = block.attention
                block.attention = NormedAttention(self.width, self.heads, rope=old.rope)
                block.attention.load_state_dict(old.state_dict(), strict=False)
        if self.recipe == "abrupt":
            with torch.no_grad():
                for layer in model.modules():
                    if isinstance(layer, Attention):
                        for part in (layer.query, layer.key):
                            if part is not None:
                                part.weight.mul_(LARGE)
        return model

    def _train(self, model: nn.Module, task: Task, monitor: Monitor, clock: Clock, device: str) -> None:
        options: dict[str, Any] = {"fused": True} if device != "cpu" else {}
        optimiser = torch.optim.AdamW(model.parameters(), self.rate, BETAS, weight_decay=DECAY, **options)
        generator = torch.Generator()
        model.train()
        for step in range(self.steps):
            generator.manual_seed((self.seed << 24) + step)
            for group in optimiser.param_groups:
                group["lr"] = self.rate * (min((step + 1) / WARMUP, 1.0) if self.recipe == "rate" else 1.0)
            inputs, targets = task.draw(step, generator)
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu" and self.recipe == "rate"):
                logits = model(inputs)
            loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            clock.note(loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), CLIP).detach())
            optimiser.step()
            if self.tau is not None:
                monitor.clip(self.tau)
            if ((step + 1) % READ == 0 or step + 1 == self.steps) and (clock.ends() or self._late()):
                return

    def _late(self) -> bool:
        return self.until is not None and time() >= self.until


class Clock:
    """Losses and gradient norms of a run, read from the device at every record; ends a run that has diverged."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.losses: list[float] = []
        self.gradients: list[float] = []
        self.alarms: list[dict[str, Any]] = []
        self.lost = False
        self._open: list[tuple[Tensor, Tensor]] = []
        self._lowest, self._since = math.inf, 0

    @property
    def step(self) -> int:
        """Steps so far."""
        return len(self.losses)

    def note(self, loss: Tensor, gradient: Tensor) -> None:
        """One step; nothing is read from the device yet."""
        self._open.append((loss, gradient))

    def ends(self) -> bool:
        """Whether the run is over: its loss is not finite, or has been far above its lowest for long."""
        losses, gradients = (torch.stack(each).tolist() for each in zip(*self._open, strict=True))
        self._open = []
        self.losses += losses
        self.gradients += gradients
        mean = float(np.mean(losses))
        self._lowest = min(self._lowest, mean)
        self._since = self._since + len(losses) if mean > self._lowest + LOST else 0
        self.lost = not math.isfinite(mean) or self._since >= LATE
        return self.lost


def _short(values: list[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def _curves(monitor: Monitor) -> dict[str, Any]:
    """Per record: every head's largest logit, and of the other metrics the extremes over heads or layers."""
    records, layers = monitor.recorder.records, [head["layer"] for head in monitor.recorder.heads]

    def column(metric: str, reduce: Any) -> list[float | None]:
        found = []
        for record in records:
            numbers = [value for value in record["values"].get(metric, ()) if value is not None]
            found.append(float(f"{reduce(numbers):.4g}") if numbers else None)
        return found

    def entropies(values: list[float | None]) -> list[float]:
        by_layer: dict[int, list[float]] = {}
        for layer, value in zip(layers, values, strict=True):
            by_layer.setdefault(layer, []).append(value if value is not None else math.nan)
        return [float(f"{np.mean(each):.4g}") if np.isfinite(np.mean(each)) else 0.0 for each in by_layer.values()]

    return {
        "steps_recorded": [record["step"] for record in records],
        "largest": [_short([math.nan if v is None else v for v in record["values"]["largest"]]) for record in records],
        "entropy": [entropies(record["values"]["relative_entropy"]) for record in records],
        "bound": column("bound", max),
        "sigma": column("sigma", max),
        "sink": column("sink", max),
        "head_gradient": column("query_gradient", max),
        "input_norm": column("input_norm", max),
    }
