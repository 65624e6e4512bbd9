"""The arithmetic of flow: attention mass between classes of tokens, summed as maps are computed.

A map A (n, n) and one-hot classes E (n, classes) give the mass EᵀAE between classes, queries by keys. Every sum is also
made of uniform attention over the visible positions, the null level: pairs (attention, uniform) lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

SINK = 0.3  # share of a head's attention above which a token is a sink (Gu et al., 2024)
FLAT = 1e-6  # relative to the mean: attention that varies less is uniform up to rounding


@dataclass(frozen=True)
class Classes:
    """Token classes of one or several texts; the `counted` ones are the modalities."""

    names: list[str]
    of: Int[Tensor, "texts n"]
    counted: list[int]

    def text(self, index: int) -> Int[Tensor, " n"]:
        """Token classes of a text; a single row applies to all texts."""
        return self.of[min(index, len(self.of) - 1)]


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """Maps of some heads of one attention call, with the visible pairs of tokens, and those that are not padding."""

    call: int  # its number
    stack: str  # the layers that a rollout goes through
    first: int  # index of the first of these heads
    last: bool  # whether these are the last heads of the call
    maps: Float[Tensor, "batch heads n n"]
    visible: Bool[Tensor, "#batch all n n"] | None  # per head, or one for all; None: everything is visible
    real: Bool[Tensor, "batch n"] | None = None  # None: all


@dataclass
class CallSums:
    """Sums over one attention call, as lists by text and head: small live tensors would fragment memory."""

    mass: dict[str, list[list[Any]]] = field(default_factory=dict)  # by reading: pairs of classes × classes
    symmetry: list[list[float | None]] = field(default_factory=list)
    reciprocity: list[list[float | None]] = field(default_factory=list)
    rollout: list[Any] = field(default_factory=list)  # of each text: a pair of classes × classes
    through: dict[int, Tensor] = field(default_factory=dict)  # Σ A V over the heads so far, by text
    heads: int = 0


@dataclass
class Crossing:
    """Sums attention between classes of tokens; keeps only the maps of the `keep` strongest heads.

    A rollout needs no product of maps: with V = E below the first layer, and V ← (mean of A V + V)/2 at each, the mass
    between classes is EᵀV.
    """

    classes: Classes
    keep: int = 0
    sink: float = SINK
    within: int | None = None  # class whose map with itself is kept too
    calls: dict[int, CallSums] = field(default_factory=dict)
    kept: list[tuple[float, int, int, Any]] = field(default_factory=list)
    rolled: dict[tuple[str, int], Float64[Tensor, "2 n classes"]] = field(default_factory=dict)  # V, by stack and text

    def add(self, heads: HeadMaps, lengths: Float[Tensor, "batch heads n"] | None = None) -> None:
        """Add some heads of an attention call; `lengths` are norms of what each token writes."""
        sums = self.calls.setdefault(heads.call, CallSums())
        for text in range(len(heads.maps)):
            for head in range(heads.maps.shape[1]):
                carried = None if lengths is None else lengths[text, heads.first + head].double()
                self._add_head(sums, heads, text, head, carried)
        sums.heads += heads.maps.shape[1]
        if heads.last:
            self._roll(sums, heads)

    def _add_head(self, sums: CallSums, heads: HeadMaps, text: int, head: int, carried: Tensor | None) -> None:
        number, attention = heads.first + head, heads.maps[text, head].double()
        visible = _of_head(heads.visible, text, number)
        keys, queries = self._members(heads, text, visible)
        both = torch.stack((attention, _uniform(visible, attention)))
        raw = queries.mT @ (both @ keys)
        masses = {"raw": raw, "residual": (raw + torch.diag_embed(queries.sum(0))) / 2}
        if carried is not None:
            masses["weighted"] = queries.mT @ (both @ (keys * carried.unsqueeze(-1)))
        paying = queries[:, self.classes.counted].sum(-1)
        received, even = paying @ both
        sinks = ((received > self.sink * paying.sum()) & (received > 3 * even)).nonzero().squeeze(1)
        masses["net"] = raw - queries.mT @ (both[..., sinks] @ keys[sinks])
        for reading, mass in masses.items():
            _row(sums.mass.setdefault(reading, []), text).append(mass.tolist())
        through = both @ self.rolled.get((heads.stack, text), keys)
        sums.through[text] = sums.through[text] + through if text in sums.through else through
        groups = [(keys[:, counted] > 0).nonzero().squeeze(1) for counted in self.classes.counted]
        _row(sums.symmetry, text).append(_symmetry(attention, groups))
        _row(sums.reciprocity, text).append(_reciprocity(attention, visible, groups))
        if self.keep and len(heads.maps) == 1:
            above = self._above_chance(masses["raw"], masses["net"])
            self._keep(above, heads.call, number, attention * queries.any(-1, keepdim=True))

    def _members(self, heads: HeadMaps, text: int, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """One-hot classes as keys and as queries, (n, classes); zero for padding and for queries that see nothing."""
        device = heads.maps.device
        keys = torch.nn.functional.one_hot(self.classes.text(text).to(device), len(self.classes.names)).double()
        if heads.real is not None:
            keys = keys * heads.real[text].to(device).unsqueeze(-1)
        elif visible is not None:
            keys = keys * visible.any(0).unsqueeze(-1)
        return keys, keys if visible is None else keys * visible.any(1).unsqueeze(-1)

    def _roll(self, sums: CallSums, heads: HeadMaps) -> None:
        """Extend the rollout by this layer: heads averaged, plus the residual stream."""
        for text, through in sums.through.items():
            keys, queries = self._members(heads, text, _of_head(heads.visible, text, 0))
            rolled = (through / sums.heads + self.rolled.get((heads.stack, text), keys)) / 2
            self.rolled[heads.stack, text] = rolled
            sums.rollout.append((queries.mT @ rolled).tolist())
        sums.through = {}

    def _above_chance(self, raw: Tensor, net: Tensor) -> float:
        counted = self.classes.counted
        null = net_shares(net[0], raw[0], counted, net[1])
        return float(crossing(net_shares(net[0], raw[0], counted) - null))

    def _keep(self, above: float, call: int, head: int, attention: Tensor) -> None:
        """Keep the maps between classes of a head, if it is among those with the largest net crossing."""
        if len(self.kept) == self.keep and above <= self.kept[0][0]:
            return
        counted, of = self.classes.counted, self.classes.text(0).to(attention.device)
        groups = [(of == number).nonzero().squeeze(1) for number in counted]
        pairs = [(q, k) for k in range(len(groups)) for q in range(len(groups)) if q != k]
        pairs += [(index, index) for index, number in enumerate(counted) if number == self.within]
        maps = [(k, q, attention[groups[q]][:, groups[k]].float().cpu()) for q, k in pairs]
        entry = (above, call, head, (maps, popularity_of(attention, groups)))
        (heappush if len(self.kept) < self.keep else heapreplace)(self.kept, entry)


def popularity_of(attention: Float[Tensor, "n n"], groups: Sequence[Int[Tensor, " _"]]) -> list[float | None]:
    """The key-only term of the scores, per token: the mean of log A over the queries that attend to all of its group.

    Each row's mean over the group is subtracted first, since softmax ignores it. For scores q·k without a position term
    it is q̄·(k − k̄), with means over these queries and keys. None with fewer than two such queries.
    """
    out: list[float | None] = [None] * len(attention)
    for keys in groups:
        rows = attention[:, keys].double()
        rows = rows[(rows > 0).all(-1)].log()
        if len(rows) > 1:
            values = (rows - rows.mean(-1, keepdim=True)).mean(0)
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                out[key] = value
    return out


def shares(mass: Float64[Tensor, "*lead classes classes"], counted: Sequence[int]) -> Float64[Tensor, "*lead m m"]:
    """Mass between the counted classes as shares of all mass between them; 0 without mass."""
    chosen = mass[..., list(counted), :][..., list(counted)]
    total = chosen.sum((-1, -2), keepdim=True)
    return chosen / total.where(total > 0, 1.0)


def net_shares(
    net: Float64[Tensor, "*lead classes classes"],
    raw: Float64[Tensor, "*lead classes classes"],
    counted: Sequence[int],
    chance: Float64[Tensor, "*lead classes classes"] | None = None,
) -> Float64[Tensor, "*lead m m"]:
    """Mass between the counted classes without sinks (`net`), as shares of all attention of their queries.

    They sum to 1 minus what goes to sinks and uncounted classes. With `chance`, the same total is divided as `chance`
    is: the null level.
    """
    paid = raw[..., list(counted), :].sum((-1, -2), keepdim=True)
    left = net[..., list(counted), :][..., list(counted)].sum((-1, -2), keepdim=True)
    return shares(net if chance is None else chance, counted) * left / paid.where(paid > 0, 1.0)


def crossing(blocks: Float[Tensor, "*lead m m"]) -> Float[Tensor, "*lead"]:
    """The total share between different classes."""
    return blocks.sum((-1, -2)) - blocks.diagonal(dim1=-2, dim2=-1).sum(-1)


def _uniform(visible: Bool[Tensor, "n n"] | None, like: Float64[Tensor, "n n"]) -> Float64[Tensor, "n n"]:
    """Uniform attention over the visible keys; 0 for a query that sees none."""
    if visible is None:
        return torch.full_like(like, 1 / len(like))
    return visible / visible.sum(-1, keepdim=True).clamp(min=1).double()


def _symmetry(attention: Float64[Tensor, "n n"], groups: list[Tensor]) -> float | None:
    """tr(C²)/‖C‖² of C, attention across classes: 1 where C is symmetric, 0 where attention is never returned."""
    energy = torch.zeros(2, dtype=torch.float64)
    for a, first in enumerate(groups):
        for second in groups[:a]:
            forth, back = attention[first][:, second], attention[second][:, first].mT
            energy += torch.stack([2 * (forth * back).sum(), forth.square().sum() + back.square().sum()]).cpu()
    return float(energy[0] / energy[1]) if energy[1] > 0 else None


def _reciprocity(
    attention: Float64[Tensor, "n n"], visible: Bool[Tensor, "n n"] | None, groups: list[Tensor]
) -> float | None:
    """The correlation of attention i → j with j → i across classes, over pairs visible in both directions.

    Computed within each pair of classes, and averaged by their number; pooled over classes, it would only reflect which
    classes attend to each other most. None where attention does not vary.
    """
    total = pairs = 0.0
    for a, first in enumerate(groups):
        for second in groups[:a]:
            both = torch.stack((attention[first][:, second], attention[second][:, first].mT)).flatten(1)
            if visible is not None:
                both = both[:, (visible[first][:, second] & visible[second][:, first].mT).flatten()]
            if both.shape[1] > 1 and bool((both.std(1) > FLAT * both.mean(1).amax()).all()):
                total += both.shape[1] * float(torch.corrcoef(both)[0, 1])
                pairs += both.shape[1]
    return total / pairs if pairs else None


def _of_head(visible: Tensor | None, text: int, head: int) -> Tensor | None:
    return None if visible is None else visible[min(text, len(visible) - 1), min(head, visible.shape[1] - 1)]


def _row(rows: list[list[Any]], text: int) -> list[Any]:
    while len(rows) <= text:
        rows.append([])
    return rows[text]
