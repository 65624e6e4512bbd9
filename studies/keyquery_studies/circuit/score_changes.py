"""One part of one head's scores left out, taken from another sequence, or matched by a random one of equal norm.

    mean      s − p                 the part is left out: contents are replaced by their means, as `kq.dial` does
    resample  s − p + p*            p* is the same part of the same head on another sequence
    random    s − σ(p)              the part stays; its values, shuffled among the keys that each query sees, are
                                    subtracted: a change of equal norm in every row, at random places

A change D of the scores is a product of n further dimensions: the query of token i is extended by row i of D, the key
of token j by the unit vector j.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keyquery.forms.parts import PARTS
from keyquery.intervene.dial.dial import Gains
from keyquery.intervene.dial.means import Means, SiteMeans
from keyquery.intervene.rewrites import rewrite, sites_of
from keyquery.intervene.sites import Context, Rewrite

KINDS = ("mean", "resample", "random")
SEED = 7  # of the shuffles


@dataclass(frozen=True)
class Change:
    """A part of a head, how it is changed, and about which means the part is: by position or global."""

    layer: int
    head: int
    part: str
    kind: str = "mean"
    means: str = "position"


class ScoreChange(Rewrite):
    """A rewrite of a layer that changes at most one part of one head; without a change it alters nothing."""

    def __init__(self, heads: int, means: Mapping[str, SiteMeans]) -> None:
        self.heads, self._means = list(range(heads)), means
        self.change: Change | None = None
        self.recording = False
        self.other: Context | None = None  # queries and keys of other sequences, for resampling

    def __call__(self, context: Context) -> tuple[Tensor, Tensor]:
        """Queries and keys of all heads, extended by the change of the scores."""
        if self.recording:
            self.other = context
        if self.change is None:
            return context.queries, context.keys
        n = context.keys.shape[-2]
        extra = context.queries.new_zeros(*context.queries.shape[:-1], n)
        extra[:, self.change.head] = self._difference(context, self.change)
        unit = torch.eye(n, dtype=context.keys.dtype, device=context.keys.device).expand_as(extra)
        return torch.cat((context.queries, extra), -1), torch.cat((context.keys, unit), -1)

    def _difference(self, context: Context, change: Change) -> Float[Tensor, "batch n n"]:
        part = self.part_of(context, change)
        if change.kind == "random":
            return -shuffled(part)
        if change.kind == "mean":
            return -part
        assert self.other is not None, "resampling needs a recorded run"
        return self.part_of(self.other, change) - part

    def part_of(self, context: Context, change: Change) -> Float[Tensor, "batch n n"]:
        """The part of the unscaled scores: what a dial with all other gains 0 leaves."""
        gains = torch.tensor([[float(part == change.part)] for part in PARTS], dtype=torch.float64)
        query, key = Gains([change.head], gains, self._means[change.means])(context)
        return (query @ key.mT)[:, 0]


def shuffled(part: Float[Tensor, "batch n n"]) -> Float[Tensor, "batch n n"]:
    """Each row's values at keys 0 to i in random order, another one in every row and sequence."""
    return part.gather(-1, _orders(tuple(part.shape), part.device))


@lru_cache(maxsize=4)
def _orders(shape: tuple[int, ...], device: torch.device) -> Int[Tensor, "batch n n"]:
    """For each query its visible keys in random order, then the others; the same for all parts and heads."""
    dice = torch.rand(shape, generator=torch.Generator().manual_seed(SEED))
    later = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    return (dice + 2.0 * later).argsort(-1).to(device)


class Changes:
    """A model in which one part at a time can be changed."""

    def __init__(self, model: nn.Module, of_layers: Mapping[int, ScoreChange]) -> None:
        self.model, self._of = model, of_layers

    def set(self, change: Change | None) -> None:
        """Set the only change; None: the model as it was."""
        for layer, own in self._of.items():
            own.change = change if change is not None and change.layer == layer else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context, what the unchanged model computes is kept for resampling."""
        self.set(None)
        try:
            for own in self._of.values():
                own.recording = True
            yield
        finally:
            for own in self._of.values():
                own.recording = False


@contextmanager
def changeable(model: nn.Module, means: Mapping[str, Means]) -> Iterator[Changes]:
    """A model whose parts can be changed within the context; `means` by kind, "position" and maybe "global"."""
    sites = sites_of(model)
    of_layers = {
        index: ScoreChange(site.count, {kind: own.of(site) for kind, own in means.items()})
        for index, site in sites.items()
    }
    with ExitStack() as stack:
        rewrite(model, sites, list(of_layers.items()), stack)
        yield Changes(model, of_layers)
