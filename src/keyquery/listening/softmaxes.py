"""The scores that a running model gives to each softmax, and what entered every module before: for proofs of a reading.

A `Call` is what analyses need of attention. A proof needs less and more: the scores in the shape that the model gave
them, of any softmax over products of activations, with the inputs of the projections that they were made by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.listening.call import Call, Tokens
from keyquery.listening.exclusive import temporarily
from keyquery.listening.functions import arguments_of, fused_facts
from keyquery.listening.hooks import slow_path
from keyquery.listening.products import Products, Scaled, Softmax, origin, tensors


@dataclass(eq=False)
class ModuleCall:
    """What entered a module, and when; and what it returned."""

    time: int
    inputs: list[Tensor]
    names: dict[str, Tensor]
    out: Tensor | None = None


class Capture(Products):
    """All softmaxes of one run, and what entered every module that has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Softmax] = []
        self.calls: dict[str, list[ModuleCall]] = {}
        self.inputs: Mapping[str, Any] = {}
        self.ran: set[str] = set()  # names of all modules that ran
        self.time = 0

    def before(self, module: str, time: int) -> ModuleCall | None:
        """The last call of a module before a time."""
        return next((call for call in reversed(self.calls.get(module, [])) if call.time < time), None)

    def after(self, module: str, time: int) -> ModuleCall | None:
        """The first call of a module after a time."""
        return next((call for call in self.calls.get(module, []) if call.time > time), None)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        super().enter(name, module, args, kwargs)
        self.ran.add(name)
        if _has_weights(module):
            named = {key: value.detach().clone() for key, value in kwargs.items() if _is_dense(value)}
            inputs = [value.detach().clone() for value in args if _is_dense(value)]
            if isinstance(module, (nn.Conv1d, nn.Conv2d)):  # its channels come first
                inputs = [value.flatten(2).mT for value in inputs]
            self.time += 1
            self.calls.setdefault(name, []).append(ModuleCall(self.time, inputs, named))

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A module returns."""
        super().leave(name, module, args, kwargs, out)
        first = next(tensors([out]), None)
        if _has_weights(module) and first is not None:
            self.calls[name][-1].out = first.detach().clone()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "relu" and (products := origin(args[0]).products):
            self.softmax(Softmax(self.owner(), args[0], products, used=True))  # scores of an indexer
        return super().__torch_function__(func, types, args, kwargs)

    def softmax(self, event: Softmax) -> None:
        """Keep a softmax, with its scores as they are now."""
        self.time += 1
        event.scores, event.time = event.scores.detach().clone(), self.time
        self.events.append(event)

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own attention, with the scores inside."""
        given = arguments_of(func, args, kwargs)
        facts = fused_facts(given, lambda sizes: (sizes[:-1].numel(), sizes[-1] if sizes else 1))
        nowhere = torch.zeros(1, 0, dtype=torch.long)
        call = Call(nn.Identity(), "", 0, facts.query, facts.key, None, facts.scale, Tokens(nowhere, nowhere))
        scores = replace(call, attn_mask=facts.attn_mask, causal=facts.causal).scores()
        scores = scores if "num_heads" in given else scores.reshape(*given["query"].shape[:-1], -1)
        product = Scaled((facts.query, call.keys()), facts.scale)
        self.softmax(Softmax(self.owner(), scores, (product,), used=True))
        return func(*args, **kwargs)


@contextmanager
def captured(model: nn.Module) -> Iterator[Capture]:
    """Record the softmaxes of what runs inside."""
    capture = Capture()
    plain = (nn.Softmax, nn.Dropout, nn.Identity)
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, plain)]
    with temporarily(model, slow_path, partial(capture.follow, modules)), torch.no_grad(), capture:
        yield capture
    capture.events = [event for event in capture.events if event.used]  # some models compute one for nothing


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
