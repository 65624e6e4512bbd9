"""One run of a model, recorded: which writes its residual stream consists of where queries and keys are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.listening.exclusive import configs_of, temporarily
from keyquery.listening.hooks import Batch, entry
from keyquery.listening.parts.pairs import ScoredPairs, watch_pairs
from keyquery.listening.residual.terms import BIAS, carried, parts
from keyquery.listening.residual.tracing import Attended, Entered, Trace, stem_of, traced

EXACT = 1e-4  # relative error up to which the writes add up to the residual stream, in float32
ROUNDED = 0.05  # the same in half precision
VISIBLE = ("eager", "sdpa")  # implementations of attention whose weights can be followed


@dataclass(frozen=True, eq=False)
class Recording:
    """What entered the attention layers in one run, with the pairs that they scored."""

    entered: dict[str, Entered]
    attended: dict[str, Attended]
    pairs: dict[int, ScoredPairs]

    def of(self, layer: Layer) -> Entered:
        """What entered a layer; raises where its writes are not known."""
        entered = self.entered.get(entry(layer))
        if entered is None:
            raise ValueError(f"{layer.name} was never called: these inputs give no activations there")
        if entered.calls > 1:
            raise ValueError(f"{layer.name} is called {entered.calls} times per run: its writes cannot be told apart")
        if entered.term is None:
            raise ValueError(f"{layer.name}: its input is not a sum of writes that can be followed, or a norm of one")
        return entered

    def weights(self, layer: Layer) -> Attended | None:
        """The attention weights and values of a layer."""
        return self.attended.get(stem_of(layer))


@contextmanager
def recording(
    model: nn.Module, heads: Heads, layers: Sequence[Layer] | None = None
) -> Iterator[Callable[[Batch], Recording]]:
    """Context whose function runs a batch and records `layers`."""
    every = list(heads)
    pairs: dict[int, ScoredPairs] = {}

    def note(layer: Layer, scored: ScoredPairs) -> None:
        pairs[layer.index] = scored

    def let_follow(changes: ExitStack) -> None:
        for config in configs_of(model):
            name = "_attn_implementation_internal"
            changes.callback(setattr, config, name, getattr(config, name))
            if getattr(config, name) not in VISIBLE:
                setattr(config, name, VISIBLE[0])

    def run(batch: Batch) -> Recording:
        pairs.clear()
        trace.clear()
        caches = getattr(getattr(model, "config", None), "use_cache", None)  # values could not be followed through one
        options: dict[str, Any] = {"use_cache": False} if caches else {}
        inner({**batch, **options})
        return Recording(dict(trace.entered), dict(trace.attended), dict(pairs))

    trace: Trace
    with (
        temporarily(model, let_follow),
        watch_pairs(model, every if layers is None else layers, note) as inner,
        traced(model, every) as trace,
    ):
        yield run


def sources_of(entered: Entered, name: str) -> dict[str, Float[Tensor, "batch n d"]]:
    """The contribution of each source to what entered a layer, in float32; raises if they do not add up."""
    assert entered.term is not None
    tokens, is_exact = entered.tokens.float(), entered.tokens.dtype in (torch.float32, torch.float64)
    out = {source: part.float() for source, part in parts(entered.term).items()}
    rounding = tokens - sum(out.values(), torch.zeros(()))
    error = float(rounding.abs().max() / tokens.abs().max().clamp(min=1e-30))
    if not error <= (EXACT if is_exact else ROUNDED):
        raise ValueError(f"{name}: the writes found do not add up to its input (off by {error:.1g})")
    return out if is_exact else {**out, "rounding": rounding}


def features_of(
    entered: Entered, features: Mapping[str, tuple[Tensor, Tensor]], name: str
) -> dict[str, Float[Tensor, "1 n d"]]:
    """Features, as directions and activations in the input of the block, as sources; the rest is "other"."""
    tokens = entered.tokens.float()
    out = {}
    for feature, (direction, activation) in features.items():
        write = (activation[:, None] * direction)[None].to(entered.tokens)
        through = None if entered.term is None or entered.block is None else carried(entered.term, entered.block, write)
        if through is None:
            raise ValueError(f"{name}: features cannot be followed from the input of its block to its queries and keys")
        out[feature] = through.float()
    return {**out, "other": tokens - sum(out.values(), torch.zeros(())), BIAS: torch.zeros_like(tokens)}
