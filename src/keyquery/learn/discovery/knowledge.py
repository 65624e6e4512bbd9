"""Background knowledge about ancestors: tiers, and single pairs that are ruled out or required."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keyquery.learn.discovery.pag import Pag, members, reached
from keyquery.support.checks import check_choice

Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Knowledge:
    """What is known before any test: an edge of x with `barred[x]` has an arrowhead there, with `causes[x]` a tail."""

    barred: Sequence[int]  # by node, the mask of nodes that are no ancestors of it
    causes: Sequence[int]  # by node, the mask of required parents

    def __bool__(self) -> bool:
        return any(self.barred) or any(self.causes)

    def mark(self, graph: Pag) -> None:
        """Reset all marks of a graph to circles, except those that are known."""
        graph.arrows, graph.tails = [0] * len(graph), [0] * len(graph)
        for x, (barred, causes) in enumerate(zip(self.barred, self.causes, strict=True)):
            for y in members(graph.adjacent[x] & barred):
                graph.put(y, x, "arrow")
            for y in members(graph.adjacent[x] & causes):
                graph.put(y, x, "tail")

    def keeps(self, x: int, y: int) -> bool:
        """Whether the edge between x and y is required."""
        return bool(self.causes[x] >> y & 1 or self.causes[y] >> x & 1)


def knowledge_of(
    count: int,
    tiers: Sequence[int] | None = None,
    forbidden: Pairs = (),
    required: Pairs = (),
    names: Sequence[str] | None = None,
) -> Knowledge:
    """Background knowledge about `count` nodes, with what follows from it; raises ValueError for a contradiction.

    No node is an ancestor of one in an earlier of the `tiers`; x of a `forbidden` pair (x, y) is not an ancestor of y;
    of a `required` one x → y.
    """
    times = [0] * count if tiers is None else tiers
    barred = [sum(1 << y for y in range(count) if times[y] > times[x]) for x in range(count)]
    causes = [0] * count
    for x, y in forbidden:
        barred[y] |= 1 << x
    for x, y in required:
        causes[y] |= 1 << x
    above = [reached(causes, node) for node in range(count)]
    label = [repr(name) for name in names or range(count)]
    for y, nodes in enumerate(above):
        for x in members(nodes):
            if above[x] >> y & 1:
                raise ValueError(f"the required causes form a cycle through {label[y]}")
            barred[x] |= 1 << y
    for y, nodes in enumerate(above):
        if clash := members(nodes & barred[y]):
            cause = label[clash[0]]
            raise ValueError(f"{cause} is required to be a cause of {label[y]}, which other knowledge forbids")
    below = [1 << x | sum(1 << y for y in range(count) if above[y] >> x & 1) for x in range(count)]
    closed = [0] * count
    for z, nodes in enumerate(barred):
        for x in members(nodes):  # nothing below x is an ancestor of z, or of what is above z
            for y in members(above[z] | 1 << z):
                closed[y] |= below[x]
    return Knowledge(closed, causes)


def tiers_of(tiers: Sequence[Sequence[str]], names: Sequence[str]) -> list[int]:
    """The number of the tier of each column; those that are not named are in the last."""
    tier_of: dict[str, int] = {}
    for number, tier in enumerate(tiers):
        for name in tier:
            check_choice("a column of tiers", name, names)
            if tier_of.setdefault(name, number) != number:
                raise ValueError(f"a column must be in one tier, but {name!r} is in several")
    return [tier_of.get(name, len(tiers) - 1) for name in names]


def pairs_of(role: str, pairs: Iterable[Sequence[str]], names: Sequence[str]) -> list[tuple[int, int]]:
    """The numbers of pairs of columns."""
    numbers = []
    for pair in map(tuple, pairs):
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ValueError(f"{role} must be pairs of columns (cause, effect), such as [('rain', 'wet')]")
        for column in pair:
            check_choice(f"a column of {role}", column, names)
        numbers.append((names.index(pair[0]), names.index(pair[1])))
    return numbers
