"""Runs of a model that differ in one layer: what lies below that layer is computed once.

Blocks are the members of a `ModuleList` through which the residual stream passes one after another. While one of them
is changed, those before it return what the last of them returned in the original run, without computing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.instruments.ablation.losses import repeated
from keyquery.listening.hooks import on_output, replace_method


@contextmanager
def from_block(model: nn.Module, module: str, run: Callable[[], Tensor]) -> Iterator[Tape | None]:
    """Context in which the blocks before that of a module are not computed, and the tape of what they returned.

    There is none where there is no block before it, or where `run`, which returns the losses of the model, does not
    return the same bit for bit without them: where blocks are connected in another way.
    """
    blocks = _before(model, module)
    with ExitStack() as changes:
        if not blocks:
            yield None
            return
        recorded: list[Any] = []
        with ExitStack() as recording:
            on_output(blocks[-1], lambda block, args, kwargs, out: recorded.append(out), recording)
            whole = run()
        if recorded:
            tape = Tape(recorded)
            for block in blocks:
                replace_method(block, "forward", tape.play if block is blocks[-1] else tape.peek, changes)
        if not recorded or not _same(run, whole):
            changes.close()
            yield None
            return
        yield tape


class Tape:
    """The outputs of a block, in the order of its calls, again and again.

    They can be repeated along the batch, for runs that do so with the model's inputs.
    """

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs
        self.rewind()

    def rewind(self, copies: int = 1) -> None:
        """Begin with the first call, and repeat its rows."""
        self._at, self._copies, self._now = 0, copies, None

    def peek(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the current call."""
        if self._now is None:
            self._now = repeated(self._outputs[self._at], self._copies)
        return self._now

    def play(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the current call, which ends with it."""
        output = self.peek()
        self._at, self._now = (self._at + 1) % len(self._outputs), None
        return output


def _before(model: nn.Module, module: str) -> list[nn.Module]:
    """The blocks before the one that a module belongs to."""
    parts = module.split(".")
    for depth in range(len(parts)):
        try:
            around = model.get_submodule(".".join(parts[:depth]))
        except AttributeError:
            return []
        if isinstance(around, nn.ModuleList) and parts[depth].isdecimal():
            return list(around)[: int(parts[depth])]
    return []


def _same(run: Callable[[], Tensor], whole: Tensor) -> bool:
    try:
        return torch.equal(run(), whole)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # any code may be in a model
        return False
