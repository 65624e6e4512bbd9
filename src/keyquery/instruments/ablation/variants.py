"""Many ablations of one layer as one batch: the model's inputs are repeated, once per ablation.

The loss is computed per ablation, on its own rows of the model's output, as if the model had run for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.instruments.ablation.losses import Loss
from keyquery.listening import Batch
from keyquery.listening.hooks import around_calls, evaluating, is_compiled

TOKENS = {"cuda": 32768, "cpu": 2048}  # of a run that leaves a device little idle time


def losses_of(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> Float[Tensor, " sequences"]:
    """One loss per sequence."""
    with evaluating(model):
        per_batch = [_checked(loss(model, batch)) for batch in batches]
    losses = torch.cat(per_batch)
    if not len(losses):
        raise ValueError("no sequence has a loss: one of at least two tokens is needed")
    return losses


def losses_together(
    model: nn.Module, batches: Sequence[Batch], loss: Loss, copies: int
) -> Float[Tensor, "copies sequences"]:
    """One loss per copy of the inputs and sequence; the model runs once per batch, on all copies."""
    per_batch = []
    with evaluating(model), Copies(model, copies).running() as repeated:
        for batch in batches:
            repeated.start()
            losses = []
            for repeated.now in range(copies):
                losses.append(_checked(loss(model, batch)))
            per_batch.append(torch.stack(losses))
    return torch.cat(per_batch, -1)


def fitting(model: nn.Module, batches: Sequence[Batch]) -> int:
    """How many copies of the inputs a run takes, from their tokens; memory may allow fewer."""
    tokens = max((batch["input_ids"].numel() for batch in batches if "input_ids" in batch), default=0)
    kind = next((weight.device.type for weight in model.parameters()), "cpu")
    return 1 if is_compiled(model) or not tokens else max(TOKENS.get(kind, 0) // tokens, 1)  # one shape per graph


def _checked(losses: Any) -> Float[Tensor, " sequences"]:
    values = torch.as_tensor(losses).detach().double().cpu()
    if values.ndim != 1:
        raise ValueError(f"loss must return one value per sequence, (batch,), got {tuple(values.shape)}")
    return finite(values)


def finite(losses: Float[Tensor, " sequences"]) -> Float[Tensor, " sequences"]:
    """Losses; raises if one of them is no number."""
    wrong = losses[~losses.isfinite()]
    if len(wrong):
        raise ValueError(f"the loss is not finite: it is {float(wrong[0])} for {len(wrong)} of {len(losses)} sequences")
    return losses


class Copies:
    """A model that runs on several copies of its inputs, and returns the rows of the copy `now`.

    It runs when the first copy is asked for; for the others, calls are answered from that run.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self._model, self.count = model, count
        self.start()

    def start(self) -> None:
        """Begin with a new batch."""
        self._outputs: list[Any] = []
        self.now = self._asked = self._calls = 0

    @contextmanager
    def running(self) -> Iterator[Copies]:
        """Context in which the model is called so."""
        with ExitStack() as changes:
            around_calls(self._model, self._call, changes)
            yield self

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.now != self._asked:
            self._asked, self._calls = self.now, 0
        if self.now == 0:
            rows = _rows((args, kwargs))
            args, kwargs = (repeated_rows(part, self.count, rows) for part in (args, kwargs))
            out = call(*args, **kwargs)
            self._outputs.append((out, rows))
        out, rows = self._outputs[self._calls]
        self._calls += 1
        return _own_rows(out, rows * self.count, slice(self.now * rows, (self.now + 1) * rows))


def _rows(inputs: Any) -> int:
    """Sequences of a call: the rows of its first tensor."""
    if isinstance(inputs, Tensor):
        return len(inputs) if inputs.ndim > 1 else 0
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else ()
    return next(filter(None, map(_rows, parts)), 0)


def repeated_rows(values: Any, copies: int, rows: int | None = None) -> Any:
    """Tensors of `rows` rows, in containers, repeated along them; default: all that have a batch."""
    if isinstance(values, Tensor):
        own = values.ndim > 1 and copies > 1 and rows in (None, len(values))
        return values.repeat(copies, *[1] * (values.ndim - 1)) if own else values
    return _mapped(values, lambda part: repeated_rows(part, copies, rows))


def _own_rows(values: Any, rows: int, own: slice) -> Any:
    """Tensors of `rows` rows, in containers, cut to some of them."""
    if isinstance(values, Tensor):
        return values[own] if values.ndim and len(values) == rows else values
    return _mapped(values, lambda part: _own_rows(part, rows, own))


def _mapped(values: Any, function: Any) -> Any:
    """A tuple, list or mapping with a function applied to its parts; anything else as it is."""
    if isinstance(values, Mapping):
        parts = {name: function(part) for name, part in values.items()}
        return parts if type(values) is dict else type(values)(**parts)
    if type(values) in (tuple, list):
        return type(values)(map(function, values))
    return values
