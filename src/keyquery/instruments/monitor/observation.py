"""What one forward of a recorded step shows: statistics of all attention calls, and of what enters their modules."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.instruments.monitor.statistics import BUDGET, statistics_by_tile, statistics_of_logits, with_entries
from keyquery.listening.attachment import add_listener
from keyquery.listening.call import HIDDEN, Call, Tokens
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
        statistics = call_statistics(call, rounding)
        if seen.statistics and seen.statistics[0].shape[-1] != call.heads:
            raise ValueError(f"{call.name or 'the model'} attends with different numbers of heads")
        seen.statistics.append(statistics)
        seen.dtype, seen.scale = rounding or call.query.dtype, call.scale
        given = Arguments() if self._run is None else self._run.arguments.get(call.module, Arguments())
        for x, real in ((given.first, call.real_queries), (given.second if call.is_cross else None, call.real)):
            if x is None or x.ndim not in (2, 3):
                continue
            x = x.detach()
            if x.ndim == 3 and getattr(call.module, "batch_first", True) is False:
                x = x.transpose(0, 1)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            norms = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
            seen.norms.append(norms if real is None or real.shape != norms.shape else norms.where(real, 0.0))
            if self.samples and seen.sample is None and not call.is_cross:
                seen.sample = sample_of(call, x)


def call_statistics(call: Call, rounding: torch.dtype | None = None) -> Float[Tensor, "tiles 7 heads"]:
    """Statistics of one call, of real queries; `rounding` is the dtype to which autocast rounds queries and keys."""
    query, key, rows = call.query.detach(), call.key.detach(), call.real_queries
    if call.given_scores is None and call.softcap is None and call.sinks is None and call.scale is not None:
        query, key = (side if rounding is None else side.to(rounding) for side in (query, key))
        return statistics_by_tile(query, key, call.scale, _mask(call), call.causal == 0, rows=rows)
    some = max(8 * BUDGET // (len(query) * query.shape[-2] * key.shape[-2]), 1)  # heads whose scores are held
    parts = []
    for start in range(0, call.heads, some):
        heads = slice(start, start + some)
        sinks = None if call.sinks is None else call.sinks[heads].detach()
        parts.append(statistics_of_logits(call.scores(heads).detach(), rows, sinks))
    statistics = torch.cat(parts, -1)
    if query.shape[-1] == 0:  # queries and keys are unknown
        return torch.cat((statistics, torch.full_like(statistics[:1], torch.nan))).unsqueeze(0)
    return with_entries(statistics, query if rows is None else query.where(rows[:, None, :, None], 0.0), key)[None]


def _mask(call: Call) -> Tensor | None:
    """The mask and bias of a call as fused attention takes them; hidden keys are at −∞ where it is additive."""
    mask, bias = call.attn_mask, call.position_bias
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.masked_fill(mask <= HIDDEN, -torch.inf)
    if call.causal:  # an offset that the kernel does not know
        n, m = call.query.shape[-2], call.key.shape[-2]
        past = torch.ones(n, m, dtype=torch.bool, device=call.query.device).tril(call.causal)
        mask = past if mask is None else mask & past if mask.dtype == torch.bool else mask.where(past, -torch.inf)
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def sample_of(call: Call, x: Tensor) -> Sample | None:
    """The first sequences and tokens of a call; None if its inputs are not its tokens."""
    batch, n, m = len(call.query), call.query.shape[-2], call.key.shape[-2]
    if n != m or x.shape[:2] != (batch, n):
        return None
    corner = slice(SEQUENCES), slice(TOKENS)
    tokens = call.tokens
    rows = (tokens.positions, tokens.key_positions, tokens.real_queries, tokens.real)
    query, key = (side[:SEQUENCES, :, :TOKENS] for side in (call.query, call.key))
    part = replace(
        call,
        query=query,
        key=key,
        value=None,
        tokens=Tokens(*(None if row is None else row[corner] for row in rows)),  # type: ignore[arg-type]
        attn_mask=_corner(call.attn_mask),
        given_scores=_corner(call.given_scores),
    )
    return Sample(x[corner], part, x._version)


def _corner(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    return (mask[:SEQUENCES] if mask.ndim == 4 else mask)[..., :TOKENS, :TOKENS]
