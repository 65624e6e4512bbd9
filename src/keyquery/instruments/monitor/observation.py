"""What one forward of a recorded step shows: statistics of all attention calls, and of what enters their modules."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.instruments.monitor.statistics import EVERY, call_statistics, part_of
from keyquery.listening.attachment import add_listener
from keyquery.listening.call import Call, Tokens
from keyquery.listening.tokens import Arguments, Run

SEQUENCES, TOKENS = 32, 256  # of a batch, from which shares are computed


@dataclass(frozen=True, eq=False)
class Sample:
    """The first sequences and tokens that enter a self-attention module, and their call."""

    inputs: Float[Tensor, "batch n d"]
    call: Call
    version: int  # of the inputs: they are not copied


@dataclass
class Seen:
    """What was seen of one attention module."""

    statistics: list[Tensor] = field(default_factory=list)  # (tiles, rows, heads) per call
    norms: list[Tensor] = field(default_factory=list)  # ‖x‖ of the tokens that enter the module, per call and input
    sample: Sample | None = None
    dtype: torch.dtype = torch.float32
    scale: float | None = None  # of the scores; None if the model does not multiply q·k by a number


class Observation:
    """Observes the attention calls of a model, by module name in `seen`, without a change to any.

    An exception does not reach the model: the first is kept in `error`. With `samples`, samples of inputs are kept.
    """

    def __init__(self, samples: bool = False) -> None:
        self.samples = samples
        self.seen: dict[str, Seen] = {}
        self.error: Exception | None = None
        self._run: Run | None = None

    def attach(self, model: nn.Module, changes: ExitStack) -> None:
        """Begin to observe a model; `changes` ends it."""
        self._run = add_listener(model, self._listen, changes, self._fail).run

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error

    def _listen(self, call: Call) -> None:
        device = call.query.device.type
        rounding = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        try:
            with torch.no_grad(), torch.autocast(device, enabled=False):
                self._add(call, rounding)
        except Exception as error:  # training goes on
            self._fail(error)

    def _add(self, call: Call, rounding: torch.dtype | None) -> None:
        seen = self.seen.setdefault(call.name, Seen())
        if seen.statistics and seen.statistics[0].shape[-1] != call.heads:
            raise ValueError(f"{call.name or 'the model'} attends with different numbers of heads")
        seen.statistics.append(call_statistics(call, rounding))
        seen.dtype, seen.scale = rounding or call.query.dtype, call.scale
        given = Arguments() if self._run is None else self._run.arguments.get(call.module, Arguments())
        for x, real in ((given.first, call.real_queries), (given.second if call.is_cross else None, call.real)):
            if x is None or x.ndim not in (2, 3):
                continue
            x = x.detach()
            if x.ndim == 3 and getattr(call.module, "batch_first", True) is False:
                x = x.transpose(0, 1)
            norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
            seen.norms.append(norms if real is None or real.shape != norms.shape else norms.where(real, 0.0))
            if self.samples and seen.sample is None and not call.is_cross:
                seen.sample = sample_of(call, x)


def sample_of(call: Call, x: Tensor) -> Sample | None:
    """The first sequences and tokens of a call; None if its inputs are not its tokens."""
    batch, n, m = len(call.query), call.query.shape[-2], call.key.shape[-2]
    if n != m or x.shape[:2] != (batch, n):
        return None
    corner = slice(SEQUENCES), slice(TOKENS)
    tokens = call.tokens
    rows = (tokens.positions, tokens.key_positions, tokens.real_queries, tokens.real)
    cut = Tokens(*(None if row is None else row[corner] for row in rows))  # type: ignore[arg-type]
    part = replace(part_of(call, corner[0], EVERY, corner[1], corner[1]), tokens=cut)
    return Sample(x[corner], part, x._version)
