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

    A head is undecided if the interval of a smaller set, or of another of that size, contains the limit and none of
    that size is below it. `sink`: its position part is mostly the first key's.
    """
    units = tuple(unit for unit in UNITS if any(unit in names for name in costs if (names := _units(name))))
    sets: list[frozenset[str]] = [frozenset(), *(kept for kept in NEEDS if kept < set(units))]
    if not units or not all(_name(kept) in costs for kept in sets):
        return None
    for size in range(len(units)):
        own = {kept: costs[_name(kept)] for kept in sets if len(kept) == size}
        kept = min(own, key=lambda kept: own[kept][0])
        if any(high <= limit for _, _, high in own.values()):
            kept = min((kept for kept in own if own[kept][2] <= limit), key=lambda kept: own[kept][0])
            return Need(_label(kept, sink), sorted(kept), _reason(kept, units, costs))
        if own[kept][1] <= limit:
            change, low, high = own[kept]
            only_kept = f"keeping {_listed(kept)} alone" if kept else "switching it off"
            reason = f"{only_kept} costs {change:+.4f} ({low:+.4f} to {high:+.4f}), across {limit:g}"
            return Need("undecided", None, reason)
    return Need(_label(frozenset(units), sink), sorted(units), _reason(frozenset(units), units, costs))


def costs_without(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The cost of each unit left out, from costs of sets alone; or that of the part, where it was left out by name."""
    others = {unit: only(set(UNITS) - {unit}) for unit in UNITS}
    return {unit: costs[name] for unit in UNITS for name in (unit, others[unit]) if name in costs}


def _name(kept: frozenset[str]) -> str:
    return only(kept) if kept else "zero"


def _units(name: str) -> set[str]:
    return set(name.removeprefix("only ").split(" + ")) if name.startswith("only ") else set()


def _listed(kept: frozenset[str]) -> str:
    return " and ".join(unit for unit in UNITS if unit in kept)


def _reason(kept: frozenset[str], units: Sequence[str], costs: Mapping[str, Cost]) -> str:
    if not kept:
        return f"it can be switched off for {costs['zero'][0]:+.4f}"
    rest = frozenset(units) - kept
    lost = costs[_name(rest)][0]
    if not rest:
        return f"needs every part ({lost:+.4f} switched off)"
    return f"needs {_listed(kept)} ({lost:+.4f} without); all else could go for {costs[_name(kept)][0]:+.4f}"


def _label(kept: frozenset[str], sink: bool) -> str:
    if kept == {"symmetric", "skew"}:
        return "pairwise"
    if len(kept) > 1:
        return "mixed"
    [unit] = kept or {"none"}
    return "sink" if unit == "position" and sink else unit
