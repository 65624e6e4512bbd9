"""The arithmetic of flow: how much attention goes from which class of tokens to which, counted as maps come in.

A map A (n, n) and classes E (n, classes), a one where a token is of a class, give the mass EᵀAE between classes: row by
row who looks, column by column who is looked at. Uniform attention over what a mask allows gives the chance level.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.capture.attention_stream import Heard

SOME = 1 << 16  # numbers of a map that are looked at together
SINK = 0.3  # the share of all of a head's attention from which on the token that takes it is a sink (Gu et al., 2024)
FLAT = 1e-6  # of the mean: attention that varies less is uniform, but for rounding


@dataclass(frozen=True)
class Classes:
    """The classes of the tokens of one or several texts; those that are `counted` are the modalities."""

    names: list[str]
    of: Int[Tensor, "texts n"]
    counted: list[int]

    def text(self, index: int) -> Int[Tensor, " n"]:
        """The classes of the tokens of a text; one row stands for all texts."""
        return self.of[min(index, len(self.of) - 1)]


@dataclass
class Call:
    """What is counted of one attention, as lists: small tensors that stay would hold on to the memory around them."""

    mass: dict[str, list[list[Any]]] = field(default_factory=dict)  # by reading, text and head; classes × classes
    chance: dict[str, list[list[Any]]] = field(default_factory=dict)
    symmetry: list[list[float | None]] = field(default_factory=list)
    reciprocity: list[list[float | None]] = field(default_factory=list)
    rollout: list[Any] = field(default_factory=list)  # of each text; classes × classes
    rollout_chance: list[Any] = field(default_factory=list)
    through: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # Σ A V over heads, while they come in
    heads: int = 0


@dataclass
class Crossing:
    """Counts attention between classes of tokens. Of all maps it keeps sums, and those of the `keep` strongest heads.

    A rollout needs no product of maps: with V = E below the first layer, and V ← (mean of A V + V)/2 at each, the mass
    between classes is EᵀV.
    """

    classes: Classes
    keep: int = 0
    sink: float = SINK
    calls: dict[int, Call] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # tokens of every call, also of those that are not counted
    kept: list[tuple[float, int, int, Any]] = field(default_factory=list)
    rolled: dict[tuple[str, int, bool], Tensor] = field(default_factory=dict)  # V, by stack, text, and True for chance

    def hear(self, heard: Heard, lengths: Float[Tensor, "batch heads n"] | None = None) -> None:
        """Count some heads of an attention; one over other numbers of tokens is not meant."""
        self.sizes[heard.call] = heard.maps.shape[-1]
        if tuple(heard.maps.shape[-2:]) != (self.classes.of.shape[1],) * 2:
            return
        if lengths is not None and (len(lengths), lengths.shape[-1]) != (len(heard.maps), heard.maps.shape[-1]):
            lengths = None  # of other tokens
        call = self.calls.setdefault(heard.call, Call())
        for text in range(len(heard.maps)):
            for head in range(heard.maps.shape[1]):
                carried = None if lengths is None else lengths[text, heard.first + head].double()
                self._one(call, heard, text, head, carried)
        call.heads += heard.maps.shape[1]
        if heard.last:
            self._roll(call, heard)

    def _one(self, call: Call, heard: Heard, text: int, head: int, carried: Tensor | None) -> None:
        number = heard.first + head
        attention, allowed = heard.maps[text, head], _at(heard.allowed, text, number)
        keys, queries = self._members(heard, text, allowed)
        for chance in (False, True):
            below = self.rolled.get((_stack(heard), text, chance), keys)
            taken = _times(allowed if chance else attention, keys, carried, below)
            mass, kind = queries.mT @ taken[0], call.chance if chance else call.mass
            _put(kind, "raw", text, mass)
            _put(kind, "residual", text, (mass + torch.diag_embed(queries.sum(0))) / 2)
            if carried is not None:
                _put(kind, "weighted", text, queries.mT @ taken[1])
            if (text, chance) in call.through:
                call.through[text, chance] += taken[-1]
            else:
                call.through[text, chance] = taken[-1]
        sinks = _sinks(attention, allowed, queries[:, self.classes.counted].sum(-1), self.sink)
        for rows, kind in ((attention, call.mass), (allowed, call.chance)):
            away = queries.mT @ _columns(rows, sinks, len(attention)) @ keys[sinks]
            _put(kind, "net", text, away.new_tensor(kind["raw"][text][-1]) - away)
        groups = [(keys[:, one] > 0).nonzero().squeeze(1) for one in self.classes.counted]
        split = _split(attention, allowed, groups)
        for found, values in zip(split, (call.symmetry, call.reciprocity), strict=True):
            _row(values, text).append(found)
        if self.keep and len(heard.maps) == 1:
            self._keep(call, heard.call, number, attention * queries.any(-1, keepdim=True))

    def _members(self, heard: Heard, text: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Classes of tokens as keys and as queries, (n, classes): padding is none, nor is a query that sees nothing."""
        device = heard.maps.device
        keys = torch.nn.functional.one_hot(self.classes.text(text).to(device), len(self.classes.names)).double()
        if heard.real is not None:
            keys = keys * heard.real[text].to(device).unsqueeze(-1)
        elif allowed is not None:
            keys = keys * allowed.any(0).unsqueeze(-1)
        return keys, keys if allowed is None else keys * allowed.any(1).unsqueeze(-1)

    def _roll(self, call: Call, heard: Heard) -> None:
        """Go on from the layers below to this one, with its heads averaged and the residual stream beside them."""
        for (text, chance), taken in call.through.items():
            keys, queries = self._members(heard, text, _at(heard.allowed, text, 0))
            place = (_stack(heard), text, chance)
            self.rolled[place] = (taken / call.heads + self.rolled.get(place, keys)) / 2
            (call.rollout_chance if chance else call.rollout).append((queries.mT @ self.rolled[place]).tolist())
        call.through = {}

    def _keep(self, call: Call, number: int, head: int, attention: Tensor) -> None:
        """The maps between classes of the heads that carry most across, net of sinks."""
        counted = self.classes.counted
        raw, net, chance = (
            torch.tensor(kind[name][0][-1], dtype=torch.float64)
            for kind, name in ((call.mass, "raw"), (call.mass, "net"), (call.chance, "net"))
        )
        above = float(crossing(net_shares(net, raw, counted) - net_shares(net, raw, counted, chance)))
        if len(self.kept) == self.keep and above <= self.kept[0][0]:
            return
        groups = [(self.classes.text(0) == one).nonzero().squeeze(1).to(attention.device) for one in counted]
        pairs = [(q, k) for k in range(len(groups)) for q in range(len(groups)) if q != k]
        maps = [(k, q, attention[groups[q]][:, groups[k]].float().cpu()) for q, k in pairs]
        (heappush if len(self.kept) < self.keep else heapreplace)(self.kept, (above, number, head, maps))


def shares(mass: Float64[Tensor, "*lead classes classes"], counted: Sequence[int]) -> Float64[Tensor, "*lead m m"]:
    """Mass between the counted classes, as shares of all mass between them; none where there is no mass.

    >>> shares(torch.tensor([[6.0, 2.0], [2.0, 0.0]]).double(), [0, 1])
    tensor([[0.6000, 0.2000],
            [0.2000, 0.0000]], dtype=torch.float64)
    """
    chosen = mass[..., list(counted), :][..., list(counted)]
    total = chosen.sum((-1, -2), keepdim=True)
    return chosen / total.where(total > 0, 1.0)


def net_shares(
    net: Float64[Tensor, "*lead classes classes"],
    raw: Float64[Tensor, "*lead classes classes"],
    counted: Sequence[int],
    chance: Float64[Tensor, "*lead classes classes"] | None = None,
) -> Float64[Tensor, "*lead m m"]:
    """Mass between the counted classes without sinks (`net`), as shares of all attention that their tokens pay.

    They add up to what neither sinks nor classes that are not counted take. With `chance`, so much is divided as that
    is: the level to hold them against.

    >>> raw = torch.tensor([[6.0, 2.0, 12.0], [2.0, 0.0, 18.0], [0.0, 0.0, 9.0]]).double()   # the last: not counted
    >>> net_shares(raw, raw, [0, 1])
    tensor([[0.1500, 0.0500],
            [0.0500, 0.0000]], dtype=torch.float64)
    """
    paid = raw[..., list(counted), :].sum((-1, -2), keepdim=True)
    left = net[..., list(counted), :][..., list(counted)].sum((-1, -2), keepdim=True)
    return shares(net if chance is None else chance, counted) * left / paid.where(paid > 0, 1.0)


def crossing(blocks: Float[Tensor, "*lead m m"]) -> Float[Tensor, "*lead"]:
    """What goes from one class to another, of shares.

    >>> crossing(torch.tensor([[0.5, 0.25], [0.25, 0.0]]))
    tensor(0.5000)
    """
    return blocks.sum((-1, -2)) - blocks.diagonal(dim1=-2, dim2=-1).sum(-1)


def _times(rows: Tensor | None, keys: Tensor, carried: Tensor | None, below: Tensor) -> list[Tensor]:
    """A map (n, n) times classes, classes by what they carry, and what came from below; each (n, classes).

    Of a mask, uniform attention over what it allows; of None, over all. Some rows at a time are made float64: whole
    maps that come and go would leave holes in memory.
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
    """Tokens that take more than `least` of what the asking tokens pay, and three times what is theirs by chance."""
    received = _received(attention, asks)
    return ((received > least * asks.sum()) & (received > 3 * _received(allowed, asks))).nonzero().squeeze(1)


def _received(rows: Tensor | None, asks: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """What each token gets of the asking ones, by a map, or as in `_times` by a mask or None; some rows at a time."""
    if rows is None:
        return asks.mean().expand(len(asks))
    out = torch.zeros_like(asks)
    for few in _few(len(rows), len(rows)):
        part = rows[few].double()
        out += (asks[few] / part.sum(-1).clamp(min=1) if rows.dtype == torch.bool else asks[few]) @ part
    return out


def _columns(rows: Tensor | None, chosen: Int[Tensor, " k"], count: int) -> Float64[Tensor, "n k"]:
    """Some columns of a map, or as in `_times` of a mask or None."""
    if rows is None:
        return torch.full((count, len(chosen)), 1 / count, dtype=torch.float64, device=chosen.device)
    found = rows[:, chosen].double()
    return found / rows.sum(-1, keepdim=True).clamp(min=1) if rows.dtype == torch.bool else found


def _few(count: int, width: int) -> list[slice]:
    size = max(1, SOME // max(width, 1))
    return [slice(start, start + size) for start in range(0, count, size)]


def _split(
    attention: Float[Tensor, "n n"], allowed: Bool[Tensor, "n n"] | None, groups: list[Tensor]
) -> tuple[float | None, float | None]:
    """Of C, attention across classes and 0 elsewhere: tr(C²)/‖C‖², and the correlation of C_ij with C_ji.

    The first is 1 where C is symmetric, 0 where what is looked at never looks back. The second is taken within each
    pair of classes, over the pairs of tokens that may look both ways, and averaged over the pairs of classes by their
    number: over all at once, it would only say which classes look at each other most.
    """
    energy, back_sum, counted = torch.zeros(2).double(), 0.0, 0.0
    near = 1 / len(attention)  # taken off before squares are summed: what varies is small beside it
    for a, mine in enumerate(groups):
        for its in groups[:a]:
            sums = torch.zeros(6).double()  # how many pairs, and Σx, Σy, Σx², Σy², Σxy
            for few in _few(len(mine), len(its)):
                there, back = attention[mine[few]][:, its].double(), attention[its][:, mine[few]].mT.double()
                energy += torch.stack([2 * (there * back).sum(), there.square().sum() + back.square().sum()]).cpu()
                if allowed is not None:
                    ways = allowed[mine[few]][:, its] & allowed[its][:, mine[few]].mT
                    there, back = there[ways], back[ways]
                x, y = there - near, back - near
                found = [x.sum(), y.sum(), x.square().sum(), y.square().sum(), (x * y).sum()]
                sums += torch.stack([x.new_tensor(x.numel()), *found]).cpu()
            correlation = _correlation(sums, near)
            if correlation is not None:
                back_sum, counted = back_sum + float(sums[0]) * correlation, counted + float(sums[0])
    symmetry = float(energy[0] / energy[1]) if energy[1] > 0 else None
    return symmetry, back_sum / counted if counted else None


def _correlation(sums: Float64[Tensor, " 6"], near: float) -> float | None:
    """Out of a number of pairs, Σx, Σy, Σx², Σy² and Σxy, of values less `near`; None where x or y does not vary."""
    pairs, means = sums[0].clamp(min=1), sums[1:3] / sums[0].clamp(min=1)
    spread = sums[3:] - pairs * torch.stack([means[0] ** 2, means[1] ** 2, means[0] * means[1]])
    level = float(pairs * (means + near).square().max())
    varies = float(spread[:2].min()) > FLAT**2 * level
    return float(spread[2] / (spread[0] * spread[1]).sqrt()) if varies else None


def _stack(heard: Heard) -> str:
    """The stack of layers that an attention is of: what its name has before the first number."""
    return re.split(r"\d", heard.module, maxsplit=1)[0]


def _at(allowed: Tensor | None, text: int, head: int) -> Tensor | None:
    return None if allowed is None else allowed[min(text, len(allowed) - 1), min(head, allowed.shape[1] - 1)]


def _row(rows: list[list[Any]], text: int) -> list[Any]:
    while len(rows) <= text:
        rows.append([])
    return rows[text]


def _put(kind: dict[str, list[list[Any]]], reading: str, text: int, value: Tensor) -> None:
    _row(kind.setdefault(reading, []), text).append(value.tolist())
