"""PDS-trees: paths that may carry dependence towards a node, and sets of nodes that are closed along them.

A PDS-path from a root goes over neighbours u – w – v where u and v are adjacent, or w is a collider (u *→ w ←* v), and
never back to the root. A set is path-closed if each member is reached from the root by such a path inside the set.
Paths may visit a node twice: that can only add candidate sets, and avoids enumerating all simple paths.
"""

from __future__ import annotations

from collections.abc import Iterator

from keyquery.learn.discovery.pag import Pag, members


def onward(graph: Pag, u: int, w: int) -> int:
    """Nodes v to which a PDS-path may continue after u – w."""
    beyond = graph.adjacent[u]
    if graph.arrows[w] >> u & 1:
        beyond |= graph.arrows[w]
    return beyond & graph.adjacent[w] & ~(1 << u)


def depths(graph: Pag, root: int) -> dict[int, int]:
    """Length of the shortest PDS-path from the root to each reachable node.

    >>> chain = Pag(3, [(0, 1, "circle", "arrow"), (1, 2, "arrow", "circle")])   # 0 o→ 1 ←o 2: a collider
    >>> depths(chain, 0), depths(chain, 1)
    ({1: 1, 2: 2}, {0: 1, 2: 1})
    """
    steps_to: dict[int, int] = {}
    frontier = {(root, child) for child in members(graph.adjacent[root])}
    seen, depth, joined = set(frontier), 0, graph.joined(root).bit_count()
    # Stop early: in a dense graph there are many more steps than nodes.
    while frontier and len(steps_to) < joined:
        depth += 1
        for _, w in sorted(frontier):
            steps_to.setdefault(w, depth)
        steps = {(w, v) for u, w in frontier for v in members(onward(graph, u, w) & ~(1 << root))}
        frontier = steps - seen
        seen |= frontier
    return steps_to


def closed_sets(graph: Pag, root: int, pool: int, largest: int) -> Iterator[list[int]]:
    """Path-closed subsets of `pool` as masks, by size up to `largest`; each list in order.

    Every closed set is a smaller one plus a node: no other path runs through the node farthest from the root.
    """
    level = {1 << x for x in members(graph.adjacent[root] & pool)}
    for size in range(1, largest + 1):
        if not level:
            return
        yield sorted(level, key=members)
        if size < largest:
            level = {mask | 1 << x for mask in level for x in members(_next(graph, root, mask) & pool & ~mask)}


def _next(graph: Pag, root: int, mask: int) -> int:
    """Nodes reached by a PDS-path from the root inside a set."""
    reached = graph.adjacent[root]
    steps = [(root, child) for child in members(reached & mask)]
    seen = set(steps)
    while steps:
        u, w = steps.pop()
        beyond = onward(graph, u, w) & ~(1 << root)
        reached |= beyond
        for v in members(beyond & mask):
            if (w, v) not in seen:
                seen.add((w, v))
                steps.append((w, v))
    return reached
