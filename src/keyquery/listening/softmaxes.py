"""The scores that a running model gives to each softmax, and what entered every module before: for proofs of a reading.

A `Call` is what analyses need of attention. A proof needs less and more: the scores in the shape that the model gave
them, of any softmax over products of activations, with the inputs of the projections that they were made by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.listening.attachment import Facts
from keyquery.listening.call import Call, Tokens
from keyquery.listening.exclusive import temporarily
from keyquery.listening.functions import NAMES, PACKED, fused_facts, packed_facts
from keyquery.listening.hooks import slow_path
from keyquery.listening.products import Product, Products, Scaled, Softmax, bound, tensors


@dataclass(eq=False)
class ModuleCall:
    """What entered a module, and when; and what it returned."""

    time: int
    inputs: list[Tensor]
    names: dict[str, Tensor]
    out: Tensor | None = None


@dataclass(eq=False)
class Capture:
    """All softmaxes of one run, and what entered every module that has parameters."""

    events: list[Softmax] = field(default_factory=list)
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)  # names of all modules that ran
    time: int = 0

    def tick(self) -> int:
        """The next point in time."""
        self.time += 1
        return self.time

    def before(self, module: str, time: int) -> ModuleCall | None:
        """The last call of a module before a time."""
        return next((call for call in reversed(self.calls.get(module, [])) if call.time < time), None)

    def after(self, module: str, time: int) -> ModuleCall | None:
        """The first call of a module after a time."""
        return next((call for call in self.calls.get(module, []) if call.time > time), None)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        self.stack.append(name)
        self.ran.add(name)
        if _has_weights(module):
            named = {key: value.detach().clone() for key, value in kwargs.items() if _is_dense(value)}
            inputs = [value.detach().clone() for value in args if _is_dense(value)]
            if isinstance(module, (nn.Conv1d, nn.Conv2d)):  # its channels come first
                inputs = [value.flatten(2).mT for value in inputs]
            self.calls.setdefault(name, []).append(ModuleCall(self.tick(), inputs, named))

    def leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        """A module returns."""
        while self.stack and self.stack.pop() != name:
            pass
        first = next(tensors([out]), None)
        if _has_weights(module) and first is not None:
            self.calls[name][-1].out = first.detach().clone()


@contextmanager
def captured(model: nn.Module) -> Iterator[Capture]:
    """Record the softmaxes of what runs inside."""
    capture = Capture()

    def listening(stack: ExitStack) -> None:
        slow_path(stack)
        for name, module in model.named_modules():
            if not isinstance(module, (nn.Softmax, nn.Dropout, nn.Identity)):
                enter, leave = partial(capture.enter, name), partial(capture.leave, name)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)

    with temporarily(model, listening), torch.no_grad(), Softmaxes(capture):
        yield capture
    capture.events = [event for event in capture.events if event.used]  # some models compute one for nothing


class Softmaxes(Products):
    """The function mode that records softmaxes, with copies of the products that they came from."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(keep=True)
        self.capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "relu" and (products := getattr(args[0], "_kq_products", ())):
            self.softmax(Softmax(self.owner(), args[0], products, used=True))  # scores of an indexer
        return super().__torch_function__(func, types, args, kwargs)

    def owner(self) -> str:
        """The innermost module that runs."""
        return self.capture.stack[-1] if self.capture.stack else ""

    def softmax(self, event: Softmax) -> None:
        """Keep a softmax, with its scores as they are now."""
        event.scores, event.time = event.scores.detach().clone(), self.capture.tick()
        self.capture.events.append(event)

    def fused(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own attention, with the scores inside."""
        if name == "multi_head_attention_forward":
            facts = packed_facts(bound(PACKED, args, kwargs))
            plain, masked = _scores(facts)
        else:
            given = bound(NAMES, args, kwargs)
            facts = fused_facts(given, _lead)
            plain, masked = (scores.reshape(*given["query"].shape[:-1], -1) for scores in _scores(facts))
        product = Scaled(Product(name, (facts.query, facts.key), kept=plain))
        self.softmax(Softmax(self.owner(), masked, (product,), used=True))
        return func(*args, **kwargs)


def _scores(facts: Facts) -> tuple[Tensor, Tensor]:
    """The scores of a call without and with its mask."""
    nowhere = torch.zeros(1, 0, dtype=torch.long)
    call = Call(
        nn.Identity(),
        "",
        0,
        facts.query,
        facts.key,
        None,
        facts.scale,
        Tokens(nowhere, nowhere),
        facts.attn_mask,
        facts.causal,
    )
    return replace(call, attn_mask=None, causal=None).scores(), call.scores()


def _lead(sizes: torch.Size) -> tuple[int, int]:
    return sizes[:-1].numel(), sizes[-1] if sizes else 1


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
