"""Changes by name, as `kq.ablate` and the command line take them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.changes import (
    BITS,
    Change,
    Quantiser,
    called,
    kept,
    off,
    quantised,
    rewritten,
    uniform,
    window,
)
from keyquery.intervene.dial.directions import KINDS as DIRECTIONS
from keyquery.intervene.dial.directions import DirectionGains, Directions, direction_gains
from keyquery.intervene.dial.means import Means
from keyquery.intervene.head_output import KINDS as WHOLE
from keyquery.intervene.head_output import mean_outputs
from keyquery.intervene.project.project import KERNELS, linear
from keyquery.intervene.sites import Site
from keyquery.listening import Batch

Changes = str | Sequence[Any] | Mapping[str, Callable[..., Tensor]]
UNITS = {  # of what a head needs: what a query does with positions counts as position
    **{part: (part,) for part in ("symmetric", "skew", "popularity")},
    "position": ("position", "query_only"),
}
PLACED = {"position", "query_only"}  # parts that not every model has
NEEDS = tuple(frozenset(units) for size in range(1, len(UNITS)) for units in combinations(UNITS, size))
COUNT = 8  # directions of a group
WINDOW = re.compile(r"window (\d+)( \+ first)?")
DIRECTION = re.compile(rf"({'|'.join(DIRECTIONS)}) direction (\d+)( on data)?")
SEVERAL = re.compile(rf"({'|'.join(DIRECTIONS)}) directions(?: (\d+))?( on data)?")
FORM = re.compile(rf"form ({'|'.join(kernel for kernel in KERNELS if kernel not in ('zero', 'general'))}|rank (\d+))")
STORED = re.compile(rf"(keys|values) ({'|'.join(map(str, BITS))})( per channel)?( rotated)?( mean apart)?")
EXAMPLES = (
    "symmetric, only position, zero, mean, uniform, window 16, window 16 + first, skew direction 0, form psd, "
    "form rank 8, keys 4, keys 4 per channel rotated mean apart, values 4; or a group: parts, only, needs, "
    "skew directions 8"
)


def only(units: Iterable[str]) -> str:
    """The name of the change that keeps some units of `UNITS` alone."""
    return "only " + " + ".join(part for unit in UNITS if unit in set(units) for part in UNITS[unit])


def uses_means(name: str) -> bool:
    """Whether a change rests on the means of data that separate the parts."""
    return name in PARTS or name.startswith("only ") or name.endswith((" apart", " on data"))


def names_of(changes: Changes, placed: bool) -> dict[str, Change | None]:
    """Changes by name, groups spelled out, of positions only if `placed`: None, or the change of a function."""
    listed = [name.strip() for name in changes.split(",")] if isinstance(changes, str) else changes
    items = listed.items() if isinstance(listed, Mapping) else ((getattr(x, "__name__", "change"), x) for x in listed)
    named: dict[str, Change | None] = {}
    for name, item in items:
        if isinstance(item, str):
            named |= dict.fromkeys(_group(item, placed) or [_checked(item, placed)])
        elif callable(item):
            named[name] = Change(name, partial(called, name, item))
        else:
            raise TypeError(f"a change must be a name or a function, got a {type(item).__name__}")
    if not named:
        raise ValueError("changes must name at least one, got none")
    return named


def _group(name: str, placed: bool) -> list[str]:
    parts = [part for part in PARTS if placed or part not in PLACED]
    if name == "parts":
        return parts
    if name == "only":
        return [f"only {part}" for part in parts]
    if name == "needs":
        units = {unit for unit in UNITS if placed or unit not in PLACED}
        return ["zero", *(only(some) for some in NEEDS if some < units)]
    if match := SEVERAL.fullmatch(name):
        return [f"{match[1]} direction {number}{match[3] or ''}" for number in range(int(match[2] or COUNT))]
    return []


def _checked(name: str, placed: bool) -> str:
    named = name.removeprefix("only ").split(" + ") if name.startswith("only ") else [name]
    parts = set(named) & set(PARTS)
    known = parts == set(named) or (
        name in (*WHOLE, "uniform") or any(kind.fullmatch(name) for kind in (WINDOW, DIRECTION, FORM, STORED))
    )
    if not known or (name.startswith("values") and name.endswith("apart")):
        raise ValueError(f"there is no change {name!r}: try {EXAMPLES}")
    if parts & PLACED and not placed:
        raise ValueError(f"this model has no positional term in its scores: {name!r} has no effect")
    return name


@dataclass
class Made:
    """Makes changes by name, for the heads in question (by site) of a model with its data."""

    model: nn.Module
    batches: Sequence[Batch]
    sites: Mapping[int, Site]
    chosen: Mapping[int, list[int]]
    means: Callable[[], Means]
    _gains: dict[Any, dict[tuple[int, int], DirectionGains]] = field(default_factory=dict)  # by kind and basis

    def change(self, name: str) -> Change:
        """The change of a name that `names_of` returned."""
        if name in PARTS:
            return Change(name, partial(kept, {*PARTS} - {name}), needs_means=True)
        if name.startswith("only "):
            return Change(name, partial(kept, name.removeprefix("only ").split(" + ")), needs_means=True)
        if name in WHOLE:
            sites = {index: self.sites[index] for index in self.chosen}
            return Change(name, partial(off, mean_outputs(self.model, self.batches, sites) if name == "mean" else None))
        if name == "uniform":
            return Change(name, uniform)
        if match := WINDOW.fullmatch(name):
            return Change(name, partial(window, int(match[1]), bool(match[2])))
        if match := DIRECTION.fullmatch(name):
            return self._direction(name, match[1], int(match[2]), "data" if match[3] else "weights")
        if match := FORM.fullmatch(name):
            kernel, rank = ("general", int(match[2])) if match[2] else (match[1], None)
            rewrites = {(i, head): linear(self.sites[i], head, kernel, rank) for i, head in self._heads()}
            return Change(name, partial(rewritten, rewrites))
        match = STORED.fullmatch(name)
        assert match is not None, name
        kind, bits, per_channel, rotated, apart = match.groups()
        means = {index: self.means().of(self.sites[index]).overall() for index in self.chosen} if apart else None
        quantiser = Quantiser(int(bits), bool(per_channel), bool(rotated))
        return Change(name, partial(quantised, kind == "values", quantiser, means), per_key_head=True)

    def _heads(self) -> list[tuple[int, int]]:
        return [(index, head) for index, numbers in self.chosen.items() for head in numbers]

    def _direction(self, name: str, kind: str, number: int, basis: str) -> Change:
        if (kind, basis) not in self._gains:
            data = self.means() if basis == "data" else None
            numbers: Directions = dict.fromkeys(self._heads(), 0)
            self._gains[kind, basis] = direction_gains(self.model, self.sites, numbers, kind, 0.0, basis, data, None)
        rewrites, facts = {}, {}
        for head, gains in self._gains[kind, basis].items():
            values, shares = gains.basis.values, gains.basis.shares
            if number >= len(values):
                raise ValueError(f"head {head[0]}.{head[1]} has {len(values)} {kind} directions: there is no {number}")
            rewrites[head] = copy(gains)
            rewrites[head].numbers = [number]
            facts[head] = {"direction": number, "value": float(values[number]), "share": float(shares[number])}
        return Change(name, partial(rewritten, rewrites), facts=facts)
