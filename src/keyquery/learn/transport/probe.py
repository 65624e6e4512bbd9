"""Outputs of one module for fixed inputs during training, without side effects on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import device_of, has_two_sides, on_output, untouched
from keyquery.listening.tokens import mask_for, masks_of
from keyquery.support.checks import check_choice
from keyquery.support.printable import first_line

KINDS = ("all", "first", "last", "mean")


class Probe:
    """Runs `inputs` through a model and returns the outputs of a module: points (n, width), float32, on the CPU.

    `inputs` is a batch or a list of them; a batch is a tensor, a tuple of arguments, or a mapping of them. Of outputs
    (batch, tokens, width), `tokens` selects "all" non-padding tokens, the "first", the "last", or their "mean".
    `owners` are the instance indices of the points. Of a module called several times, the last call counts.
    """

    def __init__(self, model: nn.Module, module: str | nn.Module, inputs: Any, tokens: str = "all") -> None:
        self.model = bare(model)
        self.module = _name(self.model, module)
        self.batches = list(inputs) if isinstance(inputs, list) else [inputs]
        if not self.batches:
            raise ValueError("inputs must contain at least one batch, got none")
        check_choice("tokens", tokens, KINDS)
        self.tokens = tokens
        self.owners: Int[Tensor, " n"] = torch.empty(0, dtype=torch.long)
        self.instances = 0

    def __call__(self) -> Float[Tensor, "n width"]:
        """The current points."""
        points, owners, self.instances = [], [], 0
        with untouched(self.model), self._hooked() as outputs:
            for batch in self.batches:
                outputs.clear()
                arguments = _run(self.model, batch)
                if not outputs:
                    raise ValueError(f"{self._called()} is not called on these inputs: there is nothing to record")
                selected, owner, count = self._selected(outputs[-1], arguments)
                points.append(selected.float().cpu())
                owners.append(self.instances + owner.cpu())
                self.instances += count
        self.owners = torch.cat(owners)
        return torch.cat(points)

    @contextmanager
    def _hooked(self) -> Iterator[list[Any]]:
        outputs: list[Any] = []
        thread = get_ident()

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if get_ident() == thread:
                outputs[:] = [output]

        with temporarily(self.model, partial(on_output, self.model.get_submodule(self.module), note)):
            yield outputs

    def _selected(self, output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
        """Points (n, width) of one batch, the instance index of each, and the number of instances."""
        output = _first(output)
        if output is None or output.ndim < 2:
            got = "no tensor" if output is None else f"shape {tuple(output.shape)}"
            raise ValueError(f"{self._called()} must give (batch, width) or (batch, tokens, width), got {got}")
        if getattr(self.model.get_submodule(self.module), "batch_first", True) is False and output.ndim == 3:
            output = output.transpose(0, 1)
        count = len(output)
        each = torch.arange(count, device=output.device)
        if output.ndim == 2:
            if self.tokens != "all":
                raise ValueError(f"tokens {self.tokens!r} needs outputs (batch, tokens, width), not (batch, width)")
            return output, each, count
        output = output.flatten(1, -2)
        mask = mask_for(masks_of(batch), tuple(output.shape[:2]), self.module, has_two_sides(self.model))
        real = torch.ones(output.shape[:2], dtype=torch.bool) if mask is None else mask
        real = real.to(output.device)
        if self.tokens == "mean":
            total = (output * real[..., None]).sum(1)
            return total / real.sum(1, keepdim=True).clamp(min=1), each, count
        order = real.long().cumsum(1)
        chosen = {"all": real, "first": real & (order == 1), "last": real & (order == order[:, -1:])}[self.tokens]
        return output[chosen], each[:, None].expand_as(chosen)[chosen], count

    def _called(self) -> str:
        return self.module or type(self.model).__name__


def _run(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Call the model; returns its keyword arguments."""
    device = device_of(model)
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    args = tuple(value.to(device) if isinstance(value, Tensor) else value for value in args)
    kwargs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    try:
        model(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{type(model).__name__} does not run on these inputs: {first_line(error)}") from error
    return kwargs


def _name(model: nn.Module, module: str | nn.Module) -> str:
    names = dict(model.named_modules())
    if isinstance(module, nn.Module):
        known = next((name for name, part in names.items() if part is module), None)
        if known is None:
            raise ValueError(f"module must be a submodule of {type(model).__name__}")
        return known
    if module not in names:
        near = get_close_matches(str(module), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{type(model).__name__} has no module {module!r}{hint}")
    return module


def _first(output: Any) -> Tensor | None:
    """The first tensor in a module's output."""
    if isinstance(output, Tensor):
        return output
    inside = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((tensor for item in inside if (tensor := _first(item)) is not None), None)
