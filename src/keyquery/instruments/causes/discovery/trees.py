"""Paths that may carry dependence towards a node (PDS-trees), and the sets of nodes that are closed along them.

A PDS-path from a root goes over neighbours u – w – v where u and v are adjacent, or w is a collider (u *→ w ←* v), and
never back to the root. A set is path-closed where each member is reached from the root by such a path inside the set.
Paths may meet a node twice: that can only add sets to try, and to find them takes no search through all paths.
"""

from __future__ import annotations

from collections.abc import Iterator

from keyquery.instruments.causes.discovery.pag import Pag, members


def onward(graph: Pag, u: int, w: int) -> int:
    """Nodes v that a PDS-path may go on to after u – w."""
    beyond = graph.adjacent[u]
    if graph.arrows[w] >> u & 1:
        beyond |= graph.arrows[w]
    return beyond & graph.adjacent[w] & ~(1 << u)


def depths(graph: Pag, root: int, limit: int | None = None) -> dict[int, int]:
    """How many steps of a PDS-path it takes from the root to each node that one reaches, within `limit` steps.

    >>> chain = Pag(3, [(0, 1, "circle", "arrow"), (1, 2, "arrow", "circle")])   # 0 o→ 1 ←o 2: a collider
    >>> depths(chain, 0), depths(chain, 1)
    ({1: 1, 2: 2}, {0: 1, 2: 1})
    """
    found: dict[int, int] = {}
    frontier = {(root, child) for child in members(graph.adjacent[root])}
    seen, depth, joined = set(frontier), 0, graph.joined(root).bit_count()
    # Of a dense graph all nodes are near, and there are many more steps than nodes.
    while frontier and len(found) < joined and (limit is None or depth < limit):
        depth += 1
        for _, w in sorted(frontier):
            found.setdefault(w, depth)
        steps = {(w, v) for u, w in frontier for v in members(onward(graph, u, w) & ~(1 << root))}
        frontier = steps - seen
        seen |= frontier
    return found


def closed_sets(graph: Pag, root: int, pool: int, largest: int) -> Iterator[list[int]]:
    """Path-closed subsets of `pool` as masks: those of one node, then of two, up to `largest`; each list in order.

    Every closed set is a smaller one and a further node: the node that is farthest from the root carries no other's
    path.

    >>> chain = Pag(3, [(0, 1, "circle", "arrow"), (1, 2, "arrow", "circle")])
    >>> [[members(one) for one in sets] for sets in closed_sets(chain, 0, 0b110, 2)]
    [[(1,)], [(1, 2)]]
    """
    first = graph.adjacent[root] & pool
    level = {1 << x for x in members(first)}
    for size in range(1, largest + 1):
        if not level:
            return
        yield sorted(level, key=members)
        if size < largest:
            level = {one | 1 << x for one in level for x in members(_next(graph, root, one) & pool & ~one)}


def _next(graph: Pag, root: int, one: int) -> int:
    """Nodes that a PDS-path from the root inside a set leads to."""
    found = graph.adjacent[root]
    steps = [(root, child) for child in members(found & one)]
    seen = set(steps)
    while steps:
        u, w = steps.pop()
        beyond = onward(graph, u, w) & ~(1 << root)
        found |= beyond
        for v in members(beyond & one):
            if (w, v) not in seen:
                seen.add((w, v))
                steps.append((w, v))
    return found
