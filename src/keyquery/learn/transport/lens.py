"""`TransportLens`: records a module's outputs for the same inputs during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from keyquery.checkpoints.sources import bare
from keyquery.learn.inputs.targets import labels_of_column
from keyquery.learn.transport.transport import FRAMES, POINTS, Course, Transport, transport
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import device_of, has_two_sides, on_output, untouched
from keyquery.listening.tokens import mask_for, masks_of
from keyquery.reading import provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.extras import optional
from keyquery.support.printable import first_line
from keyquery.support.progress import Progress

TOKENS = ("all", "first", "last", "mean")


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
        check_choice("tokens", tokens, TOKENS)
        if every != "epoch":
            check_count("every", every)
        self.model, self.tokens, self.every, self.count = bare(model), tokens, every, 0
        self.module = _name_of(self.model, module)
        self._called = self.module or type(self.model).__name__
        self.name = name or type(self.model).__name__
        self.batches = list(inputs) if isinstance(inputs, list) else [inputs]
        if not self.batches:
            raise ValueError("inputs must contain at least one batch, got none")
        start, owners, instances = self._points("the start")
        self._all = len(start)
        drawn = torch.randperm(self._all, generator=torch.Generator().manual_seed(0))
        self._kept = drawn[: points or self._all].sort().values
        self.labels: np.ndarray | None = None  # the class of every kept point
        if labels is not None:
            of_instances = labels_of_column("labels", labels)
            if (count := len(of_instances)) != instances:
                raise ValueError(f"labels must have one class per instance in inputs, {instances}, got {count}")
            self.labels = of_instances[owners[self._kept].numpy()]
        self.steps = [0]  # recorded steps or epochs; 0 is the start
        self.unit = "epoch" if every == "epoch" else "step"  # of `steps`
        self._records = [start[self._kept]]
        self._hook: Any = None
        self._optimiser: Optimizer | None = None

    def step(self) -> None:
        """Signal the end of an epoch or step; records if it is due."""
        if self._hook is not None:
            raise ValueError("inside `with lens` steps are counted by the optimiser: omit lens.step()")
        self._count()

    def path(self) -> Tensor:
        """Positions of all points at every record, (records, points, width), float32."""
        return torch.stack(self._records)

    def reading(
        self, published: bool = False, *, frames: int = FRAMES, points: int = POINTS, progress: Progress | None = None
    ) -> Transport:
        """The reading of `kq.transport` for the path so far; options as there."""
        if len(self.steps) < 2:
            progress_so_far = f" after {self.count} of {self.every} steps" if self.count else ""
            ways = "call lens.step() after each epoch, or pass every=100 and train inside `with lens`"
            raise ValueError(f"the lens has recorded only the start{progress_so_far}: {ways}")
        course = Course(self._records, self.steps)
        recorded: dict[str, Any] = {"records": len(self.steps), "every": self.every, "tensors": course.ends()}
        made = provenance(**recorded, points=f"{len(self._kept)} of {self._all}")
        reading = transport(course, self.labels, published, frames=frames, points=points, progress=progress)
        return replace(reading, model={"name": self.name, "module": self.module}, unit=self.unit, provenance=made)

    def callback(self) -> Any:
        """A TrainerCallback that records after each epoch, or every `every` optimiser steps (extra `hf`)."""
        base = optional("transformers", "callback").TrainerCallback
        event = f"on_{self.unit}_end"
        return type("Recorder", (base,), {event: lambda *_, **given: self.step()})()

    def __enter__(self) -> Self:
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
            weights = set(self.model.parameters())
            if any(weight in weights for group in optimiser.param_groups for weight in group["params"]):
                self._optimiser = optimiser
        if optimiser is self._optimiser:
            self._count()

    def _count(self) -> None:
        self.count += 1
        if self.every == "epoch" or self.count % int(self.every) == 0:
            self._record()

    def _record(self) -> None:
        when = f"{self.unit} {self.count}"
        points, *_ = self._points(when)
        if len(points) != self._all:
            then, now = f"{self._all} points at the start", f"{len(points)} at {when}"
            raise ValueError(f"{self._called} must give the same number of points: {then}, {now}")
        self.steps.append(self.count)
        self._records.append(points[self._kept])

    def _points(self, when: str) -> tuple[Float[Tensor, "n width"], Int[Tensor, " n"], int]:
        """The current points in float32 on the CPU, the instance of each, and the number of instances.

        Of a module called several times, the last call counts.
        """
        selected: list[tuple[Tensor, Tensor]] = []
        instances, outputs, thread = 0, list[Any](), get_ident()

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if get_ident() == thread:
                outputs[:] = [output]

        hooked = temporarily(self.model, partial(on_output, self.model.get_submodule(self.module), note))
        with untouched(self.model), hooked:
            for batch in self.batches:
                outputs.clear()
                arguments = _run(self.model, batch)
                if not outputs:
                    raise ValueError(f"{self._called} is not called on these inputs: there is nothing to record")
                vectors, owners, count = self._selected(outputs[0], arguments)
                selected.append((vectors.float().cpu(), instances + owners.cpu()))
                instances += count
        points, all_owners = map(torch.cat, zip(*selected, strict=True))
        if bad := int((~points.isfinite()).any(-1).sum()):
            bad_points = f"{bad} of {len(points)} points"
            raise ValueError(f"{self._called} gives NaN or infinite values at {when}, for {bad_points}")
        return points, all_owners, instances

    def _selected(self, output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
        """Points (n, width) of one batch, the instance index of each, and the number of instances."""
        output = next((part for part in tree_leaves(output) if isinstance(part, Tensor)), None)
        if output is None or output.ndim < 2:
            got = "no tensor" if output is None else f"shape {tuple(output.shape)}"
            raise ValueError(f"{self._called} must give (batch, width) or (batch, tokens, width), got {got}")
        if getattr(self.model.get_submodule(self.module), "batch_first", True) is False and output.ndim == 3:
            output = output.transpose(0, 1)
        count = len(output)
        instances = torch.arange(count, device=output.device)
        if output.ndim == 2:
            if self.tokens != "all":
                raise ValueError(f"tokens {self.tokens!r} needs outputs (batch, tokens, width), not (batch, width)")
            return output, instances, count
        output = output.flatten(1, -2)
        mask = mask_for(masks_of(batch), tuple(output.shape[:2]), self.module, has_two_sides(self.model))
        real = (torch.ones(output.shape[:2], dtype=torch.bool) if mask is None else mask).to(output.device)
        if self.tokens == "mean":
            total = (output * real[..., None]).sum(1)
            return total / real.sum(1, keepdim=True).clamp(min=1), instances, count
        order = real.long().cumsum(1)
        chosen = {"all": real, "first": real & (order == 1), "last": real & (order == order[:, -1:])}[self.tokens]
        return output[chosen], instances[:, None].expand_as(chosen)[chosen], count


def _run(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Call the model; returns its keyword arguments."""
    device = device_of(model)
    args = () if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    args = [value.to(device) if isinstance(value, Tensor) else value for value in args]
    kwargs = batch if isinstance(batch, Mapping) else {}
    kwargs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    try:
        model(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{type(model).__name__} does not run on these inputs: {first_line(error)}") from error
    return kwargs


def _name_of(model: nn.Module, module: str | nn.Module) -> str:
    names = {part: name for name, part in model.named_modules()}
    other = f"a {type(module).__name__} of another model"
    name = names.get(module, other) if isinstance(module, nn.Module) else module
    check_choice("module", name, names.values())
    return name
