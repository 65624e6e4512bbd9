"""Background knowledge about ancestors: tiers, and single pairs that are ruled out or required."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keyquery.learn.discovery.pag import Pag, later_nodes, members

Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Knowledge:
    """What is known before any test; masks of nodes, one per node.

    `barred[x]` are nodes that are not ancestors of x: an edge with one of them has an arrowhead at it. `causes[x]` are
    its required parents: these edges are tail and arrowhead, and are never removed.
    """

    barred: Sequence[int]  # masks of nodes that are no ancestors
    causes: Sequence[int]  # masks of required parents

    def __bool__(self) -> bool:
        return any(self.barred) or any(self.causes)

    def mark(self, graph: Pag) -> None:
        """Reset all marks of a graph to circles, except those that are known."""
        graph.forget(self.barred)
        for x, causes in enumerate(self.causes):
            for y in members(causes & graph.adjacent[x]):
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
    of a `required` one x → y. `names` are used in errors. If x → y is required and z is not an ancestor of y, it is not
    one of x; if x is not an ancestor of z, y is not one of z.

    >>> known = knowledge_of(3, forbidden=[(2, 1)], required=[(0, 1)])
    >>> [members(mask) for mask in known.barred]                # neither 1 nor 2 is an ancestor of 0
    [(1, 2), (2,), ()]
    """
    if tiers is not None and len(tiers) != count:
        raise ValueError(f"tiers must have one number per node, {count}, got {len(tiers)}")
    barred = [0] * count if tiers is None else later_nodes(tiers)
    causes = [0] * count
    for x, y in forbidden:
        barred[y] |= 1 << x
    for x, y in required:
        causes[y] |= 1 << x
    above = _ancestors(causes)
    label = [f"node {node}" for node in range(count)] if names is None else [repr(name) for name in names]
    for y, nodes in enumerate(above):
        if nodes >> y & 1:
            raise ValueError(f"the required causes form a cycle through {label[y]}")
        for x in members(nodes):
            barred[x] |= 1 << y
    for y, nodes in enumerate(above):
        if clash := members(nodes & barred[y]):
            raise ValueError(
                f"{label[clash[0]]} is required to be a cause of {label[y]}, which other knowledge forbids"
            )
    before: list[int] = []
    while before != barred:
        before = barred[:]
        for y, nodes in enumerate(above):
            for x in members(nodes):  # x is an ancestor of y
                barred[x] |= barred[y] & ~(1 << x)
                for z in range(count):
                    barred[z] |= (barred[z] >> x & 1) << y if z != y else 0
    return Knowledge(barred, causes)


def _ancestors(parents: Sequence[int]) -> list[int]:
    """For each node, the mask of its ancestors; itself too, if on a cycle."""
    above = list(parents)
    for _ in parents:
        for x in range(len(above)):
            for y in members(above[x]):
                above[x] |= above[y]
    return above
