"""`TransportLens`: records a module's outputs for the same inputs during training."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from keyquery.learn.transport.path import RecordedCourse, ends
from keyquery.learn.transport.probe import Probe
from keyquery.learn.transport.transport import FRAMES, POINTS, Transport, measured
from keyquery.reading import provenance
from keyquery.support.checks import check_count
from keyquery.support.extras import optional
from keyquery.support.progress import Progress


class TransportLens:
    """Record the outputs of a module for fixed inputs during training, and compare their path with optimal transport.

    The start is recorded on construction. Then `lens.step()` in a training loop records after each epoch (or every
    `every` calls); `with lens:` records every `every` steps of the model's optimiser, and at the end;
    `lens.callback()` does either in the transformers Trainer. A record runs `inputs` in eval mode without gradients,
    and restores modes, random states and buffers.

    Parameters
    ----------
    model
        The model that is trained.
    module
        Name of a module, such as "encoder.blocks.0", or the module. Default: the model's own output.
    inputs
        A batch or a list of batches: a tensor, a tuple of arguments, or a mapping of them.
    labels
        Class of each instance. Default: one class.
    every
        "epoch", or a number of steps. Default: "epoch".
    tokens
        For outputs (batch, tokens, width): "all" non-padding tokens, "first", "last" or "mean". Default: "all".
    points
        How many points to keep, drawn at random; None keeps all. Default: 2000.
    name
        Name of the model. Default: that of its class.

    Raises
    ------
    ValueError
        If the module is unknown, does not run on `inputs`, or gives NaN or infinity.

    Examples
    --------
    >>> model, x = torch.nn.Linear(2, 2), torch.randn(8, 2)
    >>> lens = kq.TransportLens(model, inputs=x)
    >>> for epoch in range(3):
    ...     _ = model.weight.data.mul_(0.5)  # training
    ...     lens.step()
    >>> reading = lens.reading()
    >>> reading.steps, round(reading.efficiency, 6)  # every point moved straight ahead
    ([0, 1, 2, 3], 1.0)

    See Also
    --------
    transport : The same for a path that is already recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        module: str | nn.Module = "",
        *,
        inputs: Any,
        labels: Any = None,
        every: int | str = "epoch",
        tokens: str = "all",
        points: int | None = 2000,
        name: str | None = None,
    ) -> None:
        check_count("points", points, optional=True)
        if every != "epoch":
            if isinstance(every, str):
                raise ValueError(f"every must be 'epoch' or a number of steps, got {every!r}")
            check_count("every", every)
        self.every, self.count = every, 0
        self.probe = Probe(model, module, inputs, tokens)
        self.name = name or type(self.probe.model).__name__
        start = self._points("the start")
        self._all = len(start)
        drawn = torch.randperm(self._all, generator=torch.Generator().manual_seed(0))
        self._kept = drawn[: points or self._all].sort().values
        self.labels = self._labels(labels)
        self.course = RecordedCourse(start[self._kept])
        self._hook: Any = None
        self._optimiser: Optimizer | None = None

    @property
    def steps(self) -> list[int]:
        """Recorded steps or epochs; 0 is the start."""
        return list(self.course.steps)

    @property
    def unit(self) -> str:
        """The unit of `steps`: "epoch" or "step"."""
        return "epoch" if self.every == "epoch" else "step"

    def step(self) -> None:
        """Signal the end of an epoch or step; records if it is due."""
        if self._hook is not None:
            raise ValueError("inside `with lens` steps are counted by the optimiser: omit lens.step()")
        self._count()

    def path(self) -> Tensor:
        """Positions of all points at every record, (records, points, width), float32."""
        return torch.stack([self.course.place(record).float() for record in range(len(self.steps))])

    def reading(
        self,
        published: bool = False,
        *,
        frames: int = FRAMES,
        points: int = POINTS,
        progress: Progress | None = None,
    ) -> Transport:
        """The reading of `kq.transport` for the path so far; options as there."""
        if len(self.steps) < 2:
            progress_so_far = f" after {self.count} of {self.every} steps" if self.count else ""
            ways = "call lens.step() after each epoch, or pass every=100 and train inside `with lens`"
            raise ValueError(f"the lens has recorded only the start{progress_so_far}: {ways}")
        recorded: dict[str, Any] = {"records": len(self.steps), "every": self.every, "tensors": ends(self.course)}
        facts = {
            "model": {"name": self.name, "module": self.probe.module},
            "unit": self.unit,
            "provenance": provenance(**recorded, points=f"{len(self._kept)} of {self._all}"),
        }
        return measured(self.course, self.labels, published, frames, points, facts, progress)

    def callback(self) -> Any:
        """A TrainerCallback that records after each epoch, or every `every` optimiser steps (extra `hf`)."""
        base = optional("transformers", "callback").TrainerCallback
        event = f"on_{self.unit}_end"
        return type("Recorder", (base,), {event: lambda *_, **given: self.step()})()

    def __enter__(self) -> TransportLens:
        if self.every != "epoch":
            self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            if kind is None and self.count > self.steps[-1]:
                self._record()  # the end of training
        self._hook = self._optimiser = None

    def _stepped(self, optimiser: Optimizer, *arguments: Any) -> None:
        """After a step of any optimiser: only the first with a parameter of the model counts."""
        if self._optimiser is None:
            own = {id(weight) for weight in self.probe.model.parameters()}
            if any(id(weight) in own for group in optimiser.param_groups for weight in group["params"]):
                self._optimiser = optimiser
        if optimiser is self._optimiser:
            self._count()

    def _count(self) -> None:
        self.count += 1
        if self.every == "epoch" or self.count % int(self.every) == 0:
            self._record()

    def _record(self) -> None:
        when = f"{self.unit} {self.count}"
        points = self._points(when)
        if len(points) != self._all:
            then, now = f"{self._all} points at the start", f"{len(points)} at {when}"
            raise ValueError(f"{self.probe.module or self.name} must give the same number of points: {then}, {now}")
        self.course.add(self.count, points[self._kept])

    def _points(self, when: str) -> Tensor:
        points = self.probe()
        bad = int((~points.isfinite()).any(-1).sum())
        if bad:
            called = self.probe.module or type(self.probe.model).__name__
            raise ValueError(f"{called} gives NaN or infinite values at {when}, for {bad} of {len(points)} points")
        return points

    def _labels(self, labels: Any) -> np.ndarray | None:
        """The class of every kept point."""
        if labels is None:
            return None
        array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if array.shape != (self.probe.instances,):
            shape, count = array.shape, self.probe.instances
            raise ValueError(f"labels must have one class per instance in inputs, {count}, got shape {shape}")
        return array[self.probe.owners[self._kept].numpy()]
