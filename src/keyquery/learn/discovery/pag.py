"""A partial ancestral graph, kept as bit masks of neighbours, and its paths that may carry dependence towards a node.

A PDS-path from a root goes over neighbours u – w – v where u and v are adjacent, or w is a collider (u *→ w ←* v), and
never back to the root. Paths may visit a node twice: that only adds candidate sets, and avoids listing simple paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any

Edge = tuple[int, int, str, str]  # i < j, the mark at i, the mark at j


@lru_cache(maxsize=1 << 16)
def members(mask: int) -> tuple[int, ...]:
    """The nodes of a mask, in order: bit i is node i."""
    nodes = []
    while mask:
        low = mask & -mask
        nodes.append(low.bit_length() - 1)
        mask ^= low
    return tuple(nodes)


class Pag:
    """A partial ancestral graph: a causal graph with hidden causes, up to Markov equivalence.

    A tail at x on the edge x – y: x is an ancestor of y (or of a selection variable). An arrowhead: it is not. A
    circle: undetermined. `adjacent`, `arrows` and `tails` hold masks of neighbours per node: all, and those whose edge
    has such a mark at the node.

    >>> graph = Pag(3, [(0, 2, "circle", "arrow"), (1, 2, "circle", "arrow")])
    >>> graph.edges(), graph.mark(0, 2), graph.mark(2, 0)
    ([(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow')], 'circle', 'arrow')
    """

    def __init__(self, count: int, edges: Iterable[Sequence[Any]] = ()) -> None:
        self.adjacent, self.arrows, self.tails = ([0] * count for _ in range(3))
        for i, j, at_i, at_j in edges:
            for x, y, mark in ((i, j, at_i), (j, i, at_j)):
                self.adjacent[x] |= 1 << y
                self.put(x, y, mark)

    @classmethod
    def complete(cls, count: int) -> Pag:
        """The complete graph with circles at all ends."""
        graph = cls(count)
        graph.adjacent = [((1 << count) - 1) ^ (1 << x) for x in range(count)]
        return graph

    def __len__(self) -> int:
        return len(self.adjacent)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Pag) and len(self) == len(other) and self.edges() == other.edges()

    def __repr__(self) -> str:
        return f"Pag({len(self)}, {self.edges()})"

    def mark(self, node: int, other: int) -> str:
        """The mark at `node` on its edge with `other`."""
        if self.arrows[node] >> other & 1:
            return "arrow"
        return "tail" if self.tails[node] >> other & 1 else "circle"

    def put(self, node: int, other: int, mark: str) -> None:
        """Set the mark at `node` on its edge with `other`."""
        bit = 1 << other
        self.arrows[node] = self.arrows[node] | bit if mark == "arrow" else self.arrows[node] & ~bit
        self.tails[node] = self.tails[node] | bit if mark == "tail" else self.tails[node] & ~bit

    def circles(self, x: int) -> int:
        """Neighbours whose edge has a circle at x."""
        return self.adjacent[x] & ~self.arrows[x] & ~self.tails[x]

    def remove(self, x: int, y: int) -> None:
        """Remove the edge between x and y."""
        for node, other in ((x, y), (y, x)):
            keep = ~(1 << other)
            self.adjacent[node] &= keep
            self.arrows[node] &= keep
            self.tails[node] &= keep

    def pairs(self) -> list[tuple[int, int]]:
        """Adjacent pairs i < j, in order."""
        return [(i, j) for i in range(len(self)) for j in members(self.adjacent[i] >> (i + 1) << (i + 1))]

    def edges(self) -> list[Edge]:
        """Every edge as (i, j, mark at i, mark at j) with i < j."""
        return [(i, j, self.mark(i, j), self.mark(j, i)) for i, j in self.pairs()]

    def parents(self, x: int) -> int:
        """Nodes y with y → x."""
        return sum(1 << y for y in members(self.arrows[x]) if self.tails[y] >> x & 1)

    def possible_parents(self, x: int) -> int:
        """Neighbours y without an arrowhead at y, and without a tail at x."""
        able = self.adjacent[x] & ~self.tails[x]
        return sum(1 << y for y in members(able) if not self.arrows[y] >> x & 1)

    def possible_ancestors(self) -> list[int]:
        """For each node, its possible ancestors: chains of possible parents."""
        parents = [self.possible_parents(x) for x in range(len(self))]
        return [reached(parents, x) for x in range(len(self))]


def reached(steps: Sequence[int], x: int) -> int:
    """Nodes that one or more steps lead to from x, without x."""
    seen, new = 0, steps[x]
    while new:
        seen |= new
        new = reduce(or_, (steps[y] for y in members(new))) & ~seen
    return seen & ~(1 << x)


def depths(graph: Pag, root: int) -> dict[int, int]:
    """Length of the shortest PDS-path from the root to each node that one leads to."""
    depth_of, joined = dict[int, int](), reached(graph.adjacent, root).bit_count()
    for depth, nodes in enumerate(_levels(graph, root), 1):
        depth_of |= dict.fromkeys(members(nodes), depth)
        if len(depth_of) == joined:  # in a dense graph there are many more paths than nodes
            break
    return depth_of


def closed_sets(graph: Pag, root: int, pool: int, largest: int) -> Iterator[list[int]]:
    """By size up to `largest`, the sets of `pool` whose members PDS-paths inside the set lead to, in order."""
    level = {1 << x for x in members(graph.adjacent[root] & pool)}
    for size in range(1, largest + 1):
        if not level:
            return
        yield sorted(level, key=members)
        if size < largest:  # each is a smaller one plus a node: no other path runs through the farthest from the root
            beyond = {mask: reduce(or_, _levels(graph, root, mask)) & pool & ~mask for mask in level}
            level = {mask | 1 << x for mask, nodes in beyond.items() for x in members(nodes)}


def _levels(graph: Pag, root: int, inside: int = -1) -> Iterator[int]:
    """Nodes that PDS-paths of one, two, … edges newly lead to; between their ends, the paths stay in a mask."""
    known = new = graph.adjacent[root]
    steps = [(root, child) for child in members(new & inside)]
    seen = set(steps)
    yield new
    while steps:
        last, steps, new = steps, [], 0
        for u, w in last:
            beyond = graph.adjacent[u] | (graph.arrows[w] if graph.arrows[w] >> u & 1 else 0)
            beyond &= graph.adjacent[w] & ~(1 << u | 1 << root)
            new |= beyond & ~known
            for v in members(beyond & inside):
                if (w, v) not in seen:
                    seen.add((w, v))
                    steps.append((w, v))
        known |= new
        yield new
