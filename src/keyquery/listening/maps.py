"""Attention maps of a running model, whole or one head at a time; it keeps its own attention implementation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch, context_of, has_two_sides, running
from keyquery.listening.listen import listen

ROW_SUM_TOLERANCE = 1e-4  # the machine epsilon in half precision
TOWERS = "has separate text and image towers without attention between them"


class SelfAttention(NamedTuple):
    """A call of a run in which a sequence attends to itself: its number among all calls, its module, its tokens."""

    number: int
    name: str
    tokens: int


def attention_maps(model: nn.Module, batch: Batch) -> tuple[Float[Tensor, "batch heads n m"], ...]:
    """The attention maps (batch, heads, queries, keys) of a model on a batch, per layer; 0 where a query sees no key.

    The layers are those of an encoder-decoder's encoder, of a vision-language model those over all of its tokens, and
    of any other model its self-attention, in the order of calls. The model runs in eval mode without gradients, with
    its own attention implementation.

    >>> attention_maps(kq.Attention(8, 2), {"x": torch.randn(1, 5, 8)})[0].shape
    torch.Size([1, 2, 5, 5])
    """
    maps: dict[int, Tensor] = {}

    def keep(call: Call, number: int) -> None:
        if is_square(call):
            maps[number] = call.weights()

    return tuple(maps[layer.number] for layer in layers_of(model, *run_with(model, batch, keep)))


def run_with(model: nn.Module, batch: Batch, on_call: Callable[[Call, int], None]) -> tuple[list[SelfAttention], Any]:
    """Run a batch, with a function that gets each attention call and its number; returns self-attention, and output."""
    calls: list[SelfAttention] = []
    numbers = count()

    def note(call: Call) -> None:
        number = next(numbers)
        if is_square(call):
            calls.append(SelfAttention(number, call.name, call.key.shape[-2]))
        on_call(call, number)

    with running(model) as run, listen(model, note):
        out = run(batch)
    return calls, out


def maps_by_head(call: Call) -> Iterator[tuple[int, Float[Tensor, "batch 1 n m"]]]:
    """The number and the maps of one head after the other: none is kept here."""
    for head in range(call.heads):
        yield head, call.weights(slice(head, head + 1))


def is_square(call: Call) -> bool:
    """Whether a sequence attends to itself, as a whole."""
    return not call.is_cross and call.query.shape[-2] == call.key.shape[-2]


def layers_of(
    model: nn.Module, calls: Sequence[SelfAttention], out: Any, tokens: int | None = None
) -> list[SelfAttention]:
    """The calls of one stack: an encoder-decoder's encoder, or the last that ran, over `tokens` if one did.

    Towers of a vision-language model run before the layers over all tokens.
    """
    outputs = out.items() if hasattr(out, "items") else ()
    if sum(value is not None for name, value in outputs if name.endswith("_model_output")) > 1:
        raise ValueError(f"{type(model).__name__} {TOWERS}")
    if has_two_sides(bare(model)):
        calls = [call for call in calls if "decoder" not in call.name.split(".")]
    stacks: dict[str, list[SelfAttention]] = {}
    for call in calls:
        stacks.setdefault(stack_of(call.name), []).append(call)
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} returns no joint attention over all of its tokens: no sequence attends to itself"
        )
    fitting = [stack for stack in stacks.values() if {call.tokens for call in stack} == {tokens}]
    return max(fitting or stacks.values(), key=lambda stack: stack[-1].number)


def stack_of(name: str) -> str:
    """The stack of layers that a module belongs to: its name up to the first number, if it has one."""
    number = re.search(r"\d", name)
    return name[: number.start()] if number else ""


def check_rows(maps: Float[Tensor, "heads n n"], rows: Bool[Tensor, "heads n"] | None = None) -> None:
    """Require non-negative attention whose rows sum to 1; `rows` selects the rows to check."""
    near, n = max(ROW_SUM_TOLERANCE, torch.finfo(maps.dtype).eps), maps.shape[-1]
    lowest = int(maps.argmin())
    if maps.flatten()[lowest] < 0:
        head, row = divmod(lowest // n, n)
        least = float(maps.flatten()[lowest])
        raise ValueError(f"attention must not be negative, got {least:.3g} in row {row} of head {head}")
    sums = maps.sum(-1, dtype=torch.float64)
    far = (sums - 1).abs() if rows is None else (sums - 1).abs() * rows
    head, row = divmod(int(far.argmax()), n)
    if far[head, row] > near:
        total = float(sums[head, row])
        raise ValueError(
            f"rows of attention must sum to 1, within {near:.3g}; row {row} of head {head} sums to {total:.6g}"
        )


def check_length(model: nn.Module, tokens: int) -> None:
    """Raise if a text is longer than the model's context."""
    longest = context_of(model)
    if longest is not None and tokens > longest:
        raise ValueError(
            f"the text has {tokens} tokens, and {type(model).__name__} takes at most {longest}: use a shorter one"
        )
