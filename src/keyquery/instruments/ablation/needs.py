"""What a head needs: the smallest set of parts of its scores that keeps the loss, from costs of every set alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from keyquery.instruments.ablation.named import NEEDS, UNITS, only

Cost = Sequence[float]  # change, low, high
LABELS = ("none", "position", "sink", "popularity", "symmetric", "skew", "pairwise", "mixed", "undecided")


class Need(NamedTuple):
    """The label of a head, the units of its scores that it needs, and the costs that say so in a sentence."""

    label: str
    needs: list[str] | None  # None: undecided
    reason: str


def need_of(costs: Mapping[str, Cost], limit: float, sink: bool = False) -> Need | None:
    """The smallest set whose loss is kept up to `limit`, undecided if the interval of a smaller set contains it."""
    sets = _sets(costs)
    units = frozenset[str]().union(*sets)
    for size in range(len(units)):
        of_size = sorted((kept for kept in sets if len(kept) == size), key=lambda kept: sets[kept][0])
        for kept in of_size:
            if sets[kept][2] <= limit:
                return Need(_label(kept, sink), sorted(kept), _reason(kept, units, sets))
        for kept in of_size:
            change, low, high = sets[kept]
            if low <= limit:
                sure = _listed(unit for unit in units if sets[units - {unit}][1] > limit)  # needed in any case
                only_kept = f"keeping {_listed(kept)} alone" if kept else "switching it off"
                interval = f"{only_kept} costs {change:.3f} ({low:.3f} to {high:.3f}) nats"
                return Need("undecided", None, (f"needs at least {sure}; " if sure else "") + interval)
    return Need(_label(units, sink), sorted(units), _reason(units, units, sets)) if units else None


def costs_without(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The costs without each part, also where only its complement was kept; other changes follow."""
    sets = _sets(costs)
    units = frozenset[str]().union(*sets)
    named = {name: cost for name, cost in costs.items() if not name.startswith("only ")}
    return {unit: sets[units - {unit}] for unit in UNITS if unit in units} | named


def _sets(costs: Mapping[str, Cost]) -> dict[frozenset[str], Cost]:
    """The cost of each set of a model's units alone, none of them included; empty unless all are known."""
    mentioned = {part for name in costs if name.startswith("only ") for part in name.removeprefix("only ").split(" + ")}
    units = mentioned & UNITS.keys()
    names = {frozenset[str](): "zero"} | {kept: only(kept) for kept in NEEDS if kept < units}
    known = len(units) > 2 and all(name in costs for name in names.values())
    return {kept: costs[name] for kept, name in names.items()} if known else {}


def _listed(kept: Iterable[str]) -> str:
    return " and ".join(sorted(kept, key=list(UNITS).index))


def _reason(kept: frozenset[str], units: frozenset[str], sets: Mapping[frozenset[str], Cost]) -> str:
    if not kept:
        return f"can be switched off ({sets[kept][0]:.3f} nats)"
    lost = sets[units - kept][0]
    if kept == units:
        return f"needs every part ({lost:.3f} nats switched off)"
    return f"needs {_listed(kept)} ({lost:.3f} nats); all else could go for {sets[kept][0]:.3f}"


def _label(kept: frozenset[str], sink: bool) -> str:
    if kept == {"symmetric", "skew"}:
        return "pairwise"
    if len(kept) > 1:
        return "mixed"
    [unit] = kept or {"none"}
    return "sink" if unit == "position" and sink else unit
