"""What a head needs: the smallest set of parts of its scores that keeps the loss, from costs of every set alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The smallest set whose loss is kept up to `limit`, by the upper end of its interval; None if costs are missing.

    A head is undecided if the interval of a smaller set contains the limit. `sink`: its position part is mostly the
    first key's.
    """
    units = units_of(costs)
    if not units:
        return None
    sets = _sets(units)
    for size in range(len(units)):
        of_size = sorted((kept for kept in sets if len(kept) == size), key=lambda kept: costs[_name(kept)][0])
        for kept in of_size:
            if costs[_name(kept)][2] <= limit:
                return Need(_label(kept, sink), sorted(kept), _reason(kept, units, costs))
        for kept in of_size:
            change, low, high = costs[_name(kept)]
            if low <= limit:
                only_kept = f"keeping {_listed(kept)} alone" if kept else "switching it off"
                interval = f"{only_kept} costs {change:.3f} ({low:.3f} to {high:.3f}) nats"
                return Need("undecided", None, _surely(units, costs, limit) + interval)
    return Need(_label(frozenset(units), sink), sorted(units), _reason(frozenset(units), units, costs))


def costs_without(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The costs without each part, also where only its complement was kept; other changes follow."""
    named = {name: cost for name, cost in costs.items() if not name.startswith("only ")}
    units = units_of(costs)
    return {unit: costs[only(set(units) - {unit})] for unit in units} | named


def units_of(costs: Mapping[str, Cost]) -> tuple[str, ...]:
    """The units of a model, if the cost of each set of them alone is known; else none."""
    mentioned = {part for name in costs if name.startswith("only ") for part in name.removeprefix("only ").split(" + ")}
    units = tuple(unit for unit in UNITS if unit in mentioned)
    return units if len(units) > 2 and all(_name(kept) in costs for kept in _sets(units)) else ()


def _sets(units: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(), *(kept for kept in NEEDS if kept < set(units))]


def _name(kept: frozenset[str]) -> str:
    return only(kept) if kept else "zero"


def _surely(units: Sequence[str], costs: Mapping[str, Cost], limit: float) -> str:
    """The units that an undecided head needs in any case."""
    sure = frozenset(unit for unit in units if costs[_name(frozenset(units) - {unit})][1] > limit)
    return f"needs at least {_listed(sure)}; " if sure else ""


def _listed(kept: frozenset[str]) -> str:
    return " and ".join(unit for unit in UNITS if unit in kept)


def _reason(kept: frozenset[str], units: Sequence[str], costs: Mapping[str, Cost]) -> str:
    if not kept:
        return f"can be switched off ({costs['zero'][0]:.3f} nats)"
    rest = frozenset(units) - kept
    lost = costs[_name(rest)][0]
    if not rest:
        return f"needs every part ({lost:.3f} nats switched off)"
    return f"needs {_listed(kept)} ({lost:.3f} nats); all else could go for {costs[_name(kept)][0]:.3f}"


def _label(kept: frozenset[str], sink: bool) -> str:
    if kept == {"symmetric", "skew"}:
        return "pairwise"
    if len(kept) > 1:
        return "mixed"
    [unit] = kept or {"none"}
    return "sink" if unit == "position" and sink else unit
