"""The arithmetic of flow: attention mass between classes of tokens, summed as maps are computed.

A map A (n, n) and one-hot classes E (n, classes) give the mass EᵀAE between classes, queries by keys. Uniform attention
over the visible positions gives the null level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

SOME = 1 << 16  # entries of a map processed at a time
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
    """Sums over one attention call, as lists: small live tensors would fragment memory."""

    mass: dict[str, list[list[Any]]] = field(default_factory=dict)  # by reading, text and head; classes × classes
    chance: dict[str, list[list[Any]]] = field(default_factory=dict)
    symmetry: list[list[float | None]] = field(default_factory=list)
    reciprocity: list[list[float | None]] = field(default_factory=list)
    rollout: list[Any] = field(default_factory=list)  # of each text; classes × classes
    rollout_chance: list[Any] = field(default_factory=list)
    through: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # Σ A V over the heads so far
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
    rolled: dict[tuple[str, int, bool], Tensor] = field(default_factory=dict)  # V, by stack, text, and True for chance

    def add(self, heads: HeadMaps, lengths: Float[Tensor, "batch heads n"] | None = None) -> None:
        """Add some heads of an attention call."""
        sums = self.calls.setdefault(heads.call, CallSums())
        for text in range(len(heads.maps)):
            for head in range(heads.maps.shape[1]):
                carried = None if lengths is None else lengths[text, heads.first + head].double()
                self._add_head(sums, heads, text, head, carried)
        sums.heads += heads.maps.shape[1]
        if heads.last:
            self._roll(sums, heads)

    def _add_head(self, sums: CallSums, heads: HeadMaps, text: int, head: int, carried: Tensor | None) -> None:
        number = heads.first + head
        attention, allowed = heads.maps[text, head], _at(heads.visible, text, number)
        keys, queries = self._members(heads, text, allowed)
        for chance in (False, True):
            below = self.rolled.get((heads.stack, text, chance), keys)
            products = _times(allowed if chance else attention, keys, carried, below)
            mass, kind = queries.mT @ products[0], sums.chance if chance else sums.mass
            _put(kind, "raw", text, mass)
            _put(kind, "residual", text, (mass + torch.diag_embed(queries.sum(0))) / 2)
            if carried is not None:
                _put(kind, "weighted", text, queries.mT @ products[1])
            if (text, chance) in sums.through:
                sums.through[text, chance] += products[-1]
            else:
                sums.through[text, chance] = products[-1]
        sinks = _sinks(attention, allowed, queries[:, self.classes.counted].sum(-1), self.sink)
        for rows, kind in ((attention, sums.mass), (allowed, sums.chance)):
            away = queries.mT @ _columns(rows, sinks, len(attention)) @ keys[sinks]
            _put(kind, "net", text, away.new_tensor(kind["raw"][text][-1]) - away)
        groups = [(keys[:, number_of_class] > 0).nonzero().squeeze(1) for number_of_class in self.classes.counted]
        split = _split(attention, allowed, groups)
        for value, values in zip(split, (sums.symmetry, sums.reciprocity), strict=True):
            _row(values, text).append(value)
        if self.keep and len(heads.maps) == 1:
            self._keep(sums, heads.call, number, attention * queries.any(-1, keepdim=True))

    def _members(self, heads: HeadMaps, text: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """One-hot classes as keys and as queries, (n, classes); zero for padding and for queries that see nothing."""
        device = heads.maps.device
        keys = torch.nn.functional.one_hot(self.classes.text(text).to(device), len(self.classes.names)).double()
        if heads.real is not None:
            keys = keys * heads.real[text].to(device).unsqueeze(-1)
        elif allowed is not None:
            keys = keys * allowed.any(0).unsqueeze(-1)
        return keys, keys if allowed is None else keys * allowed.any(1).unsqueeze(-1)

    def _roll(self, sums: CallSums, heads: HeadMaps) -> None:
        """Extend the rollout by this layer: heads averaged, plus the residual stream."""
        for (text, chance), summed in sums.through.items():
            keys, queries = self._members(heads, text, _at(heads.visible, text, 0))
            place = (heads.stack, text, chance)
            self.rolled[place] = (summed / sums.heads + self.rolled.get(place, keys)) / 2
            (sums.rollout_chance if chance else sums.rollout).append((queries.mT @ self.rolled[place]).tolist())
        sums.through = {}

    def _keep(self, sums: CallSums, number: int, head: int, attention: Tensor) -> None:
        """Keep the maps between classes of the heads with the largest net crossing."""
        counted = self.classes.counted
        raw, net, chance = (
            torch.tensor(kind[name][0][-1], dtype=torch.float64)
            for kind, name in ((sums.mass, "raw"), (sums.mass, "net"), (sums.chance, "net"))
        )
        above = float(crossing(net_shares(net, raw, counted) - net_shares(net, raw, counted, chance)))
        if len(self.kept) == self.keep and above <= self.kept[0][0]:
            return
        groups = [
            (self.classes.text(0) == number_of_class).nonzero().squeeze(1).to(attention.device)
            for number_of_class in counted
        ]
        pairs = [(q, k) for k in range(len(groups)) for q in range(len(groups)) if q != k]
        pairs += [(at, at) for at, number_of_class in enumerate(counted) if number_of_class == self.within]
        maps = [(k, q, attention[groups[q]][:, groups[k]].float().cpu()) for q, k in pairs]
        entry = (above, number, head, (maps, popularity_of(attention, groups)))
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


def _times(rows: Tensor | None, keys: Tensor, carried: Tensor | None, below: Tensor) -> list[Tensor]:
    """A map (n, n) times classes, norm-weighted classes, and the rollout so far; each (n, classes).

    For a mask, uniform attention over the visible keys; for None, over all. Rows are converted to float64 in chunks, to
    avoid memory fragmentation.
    """
    parts = [keys, *([] if carried is None else [keys * carried.unsqueeze(-1)]), below]
    right = torch.cat(parts, -1)
    if rows is None:
        out = right.mean(0, keepdim=True).expand_as(right).clone()
    else:
        out = torch.empty_like(right)
        for few in _few(len(rows), len(rows)):
            part = rows[few].double()
            out[few] = (part / part.sum(-1, keepdim=True).clamp(min=1) if rows.dtype == torch.bool else part) @ right
    return list(out.split([part.shape[-1] for part in parts], -1))


def _sinks(attention: Tensor, allowed: Tensor | None, asks: Float[Tensor, " n"], least: float) -> Int[Tensor, " sinks"]:
    """Keys that receive more than `least` of the attention of the queries `asks`, and three times the null level."""
    received = _received(attention, asks)
    return ((received > least * asks.sum()) & (received > 3 * _received(allowed, asks))).nonzero().squeeze(1)


def _received(rows: Tensor | None, asks: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Attention that each key receives from the queries `asks`; maps, masks and None as in `_times`."""
    if rows is None:
        return asks.mean().expand(len(asks))
    out = torch.zeros_like(asks)
    for few in _few(len(rows), len(rows)):
        part = rows[few].double()
        out += (asks[few] / part.sum(-1).clamp(min=1) if rows.dtype == torch.bool else asks[few]) @ part
    return out


def _columns(rows: Tensor | None, chosen: Int[Tensor, " k"], count: int) -> Float64[Tensor, "n k"]:
    """Some columns of a map; masks and None as in `_times`."""
    if rows is None:
        return torch.full((count, len(chosen)), 1 / count, dtype=torch.float64, device=chosen.device)
    columns = rows[:, chosen].double()
    return columns / rows.sum(-1, keepdim=True).clamp(min=1) if rows.dtype == torch.bool else columns


def _few(count: int, width: int) -> list[slice]:
    size = max(1, SOME // max(width, 1))
    return [slice(start, start + size) for start in range(0, count, size)]


def _split(
    attention: Float[Tensor, "n n"], allowed: Bool[Tensor, "n n"] | None, groups: list[Tensor]
) -> tuple[float | None, float | None]:
    """Symmetry tr(C²)/‖C‖² of C, attention across classes, and reciprocity, the correlation of C_ij with C_ji.

    Symmetry is 1 where C is symmetric, 0 where attention is never returned. Reciprocity is computed within each pair of
    classes, over token pairs visible in both directions, and averaged by their number; pooled over classes, it would
    only reflect which classes attend to each other most.
    """
    energy = torch.zeros(2).double()
    back_sum = 0.0
    counted = 0.0
    near = 1 / len(attention)  # subtracted before squaring, for precision
    for a, mine in enumerate(groups):
        for its in groups[:a]:
            sums = torch.zeros(6).double()  # number of pairs, Σx, Σy, Σx², Σy², Σxy
            for few in _few(len(mine), len(its)):
                forth, back = attention[mine[few]][:, its].double(), attention[its][:, mine[few]].mT.double()
                energy += torch.stack([2 * (forth * back).sum(), forth.square().sum() + back.square().sum()]).cpu()
                if allowed is not None:
                    ways = allowed[mine[few]][:, its] & allowed[its][:, mine[few]].mT
                    forth, back = forth[ways], back[ways]
                x, y = forth - near, back - near
                sums_of_chunk = [x.sum(), y.sum(), x.square().sum(), y.square().sum(), (x * y).sum()]
                sums += torch.stack([x.new_tensor(x.numel()), *sums_of_chunk]).cpu()
            correlation = _correlation(sums, near)
            if correlation is not None:
                back_sum, counted = back_sum + float(sums[0]) * correlation, counted + float(sums[0])
    symmetry = float(energy[0] / energy[1]) if energy[1] > 0 else None
    return symmetry, back_sum / counted if counted else None


def _correlation(sums: Float64[Tensor, " 6"], near: float) -> float | None:
    """Correlation from n, Σx, Σy, Σx², Σy² and Σxy of values minus `near`; None if x or y is constant."""
    pairs, means = sums[0].clamp(min=1), sums[1:3] / sums[0].clamp(min=1)
    spread = sums[3:] - pairs * torch.stack([means[0] ** 2, means[1] ** 2, means[0] * means[1]])
    level = float(pairs * (means + near).square().max())
    varies = float(spread[:2].min()) > FLAT**2 * level
    return float(spread[2] / (spread[0] * spread[1]).sqrt()) if varies else None


def _at(allowed: Tensor | None, text: int, head: int) -> Tensor | None:
    return None if allowed is None else allowed[min(text, len(allowed) - 1), min(head, allowed.shape[1] - 1)]


def _row(rows: list[list[Any]], text: int) -> list[Any]:
    while len(rows) <= text:
        rows.append([])
    return rows[text]


def _put(kind: dict[str, list[list[Any]]], reading: str, text: int, value: Tensor) -> None:
    _row(kind.setdefault(reading, []), text).append(value.tolist())
