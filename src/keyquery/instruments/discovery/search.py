"""From tests of independence to a partial ancestral graph: ICD, and FCI as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from keyquery.instruments.discovery.independence import Query, Test
from keyquery.instruments.discovery.pag import Pag, members
from keyquery.instruments.discovery.rules import arrowheads, finish, orient
from keyquery.instruments.discovery.trees import closed_sets, depths

# Sets that may separate a pair, each with its cost: cheaper ones are tried first.
Candidates = list[tuple[int, int]]


@dataclass(frozen=True)
class Found:
    """A graph, after how many rounds, and whether the search came to its end; what separates each pair apart."""

    graph: Pag
    rounds: int
    done: bool
    separations: dict[tuple[int, int], int]


def icd(
    test: Test, rounds: int | None = None, order_free: bool = True, selection: bool = False, tails: bool = True
) -> Found:
    """Iterative causal discovery: the graph after `rounds` rounds, all of them unless given.

    >>> import networkx
    >>> from keyquery.instruments.discovery import DSeparation
    >>> icd(DSeparation(networkx.DiGraph([(0, 2), (1, 2), (2, 3)]), range(4))).graph.edges()
    [(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow'), (2, 3, 'tail', 'arrow')]
    """
    for found in icd_rounds(test, order_free, selection, tails):
        if found.done or found.rounds == rounds:
            break
    return found


def icd_rounds(test: Test, order_free: bool = True, selection: bool = False, tails: bool = True) -> Iterator[Found]:
    """The graph after each round, the last of which is done. Round r conditions on sets of r nodes.

    Every one is valid for what was tested: the search can be stopped at any time. Candidates of round 0 are the empty
    set, of round 1 single neighbours of either node; later those of `icd_sets`. With `order_free`, edges are deleted at
    the end of a round, and of the cheapest sets that separate a pair the one that does so best is kept.
    """
    graph, separations, size = Pag.complete(test.count), dict[tuple[int, int], int](), 0
    while True:
        some = _round(graph, test, separations, _sets_of(size), order_free)
        if size < 2 or some:
            graph = arrowheads(graph, separations)
        last = (size > 0 and not some) or size >= test.most
        yield Found(finish(graph, separations, selection, tails), size + 1, last, dict(separations))
        if last:
            return
        size += 1


def fci(test: Test, order_free: bool = True, selection: bool = False, tails: bool = True) -> Found:
    """Fast causal inference: subsets of neighbours by size, then subsets of the possible d-separating sets.

    >>> import networkx
    >>> from keyquery.instruments.discovery import DSeparation
    >>> fci(DSeparation(networkx.DiGraph([(0, 2), (1, 2), (2, 3)]), range(4))).graph.edges()
    [(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow'), (2, 3, 'tail', 'arrow')]
    """
    graph, separations, size = Pag.complete(test.count), dict[tuple[int, int], int](), 0
    for size in range(test.most + 1):
        if not _round(graph, test, separations, _neighbours(size), order_free):
            break
    colliders = orient(graph, separations, tails=False)
    reached = [sum(1 << x for x in depths(colliders, root)) for root in range(test.count)]
    for size in range(1, test.most + 1):
        if not _round(graph, test, separations, _subsets(reached, size), order_free):
            break
    return Found(orient(graph, separations, selection, tails), size + 1, True, separations)


def _round(
    graph: Pag,
    test: Test,
    separations: dict[tuple[int, int], int],
    sets: Callable[[Pag], Callable[[int, int], Candidates]],
    order_free: bool,
) -> bool:
    """Try every adjacent pair, delete the edges of those that are separated; whether there was anything to try."""
    pairs, some, gone = graph.pairs(), False, []
    of = sets(graph)
    todo = [(x, y, of(x, y)) for x, y in pairs] if order_free else []
    test.prepare(Query(x, y, given) for x, y, candidates in todo for _, given in candidates)
    for x, y, candidates in todo or ((x, y, None) for x, y in pairs):
        if candidates is None:
            candidates = of(x, y)
            test.prepare(Query(x, y, given) for _, given in candidates)
        some = some or bool(candidates)
        given = _best(test, x, y, candidates) if order_free else _first(test, x, y, candidates)
        if given is None:
            continue
        separations[x, y] = given
        if order_free:
            gone.append((x, y))
        else:
            graph.remove(x, y)
            of = sets(graph)
    for x, y in gone:
        graph.remove(x, y)
    return some


def _first(test: Test, x: int, y: int, candidates: Candidates) -> int | None:
    """The first set that separates, cheaper ones before."""
    return next((z for _, z in candidates if test.statistic(Query(x, y, z)) < test.threshold), None)


def _best(test: Test, x: int, y: int, candidates: Candidates) -> int | None:
    """Of the cheapest sets that separate, the one that leaves least dependence."""
    best, given, price = test.threshold, None, None
    for cost, z in candidates:
        if given is not None and cost != price:
            break
        statistic = test.statistic(Query(x, y, z))
        if statistic < best:
            best, given, price = statistic, z, cost
    return given


def _sets_of(size: int) -> Callable[[Pag], Callable[[int, int], Candidates]]:
    return icd_sets(size) if size > 1 else _neighbours(size)


def _neighbours(size: int) -> Callable[[Pag], Callable[[int, int], Candidates]]:
    """Sets of neighbours of x, then of y; all cost the same."""

    def of(graph: Pag) -> Callable[[int, int], Candidates]:
        return lambda x, y: [(0, z) for z in _choose([graph.adjacent[x], graph.adjacent[y]], x, y, size)]

    return of


def _subsets(pools: list[int], size: int) -> Callable[[Pag], Callable[[int, int], Candidates]]:
    def of(graph: Pag) -> Callable[[int, int], Candidates]:
        return lambda x, y: [(0, z) for z in _choose([pools[x], pools[y]], x, y, size)]

    return of


def _choose(pools: Iterable[int], x: int, y: int, size: int) -> Iterable[int]:
    """Masks of `size` nodes of each pool, without x and y and without repeats."""
    aside = ~(1 << x | 1 << y)
    found: dict[int, None] = {}
    for pool in pools:
        for some in combinations(members(pool & aside), size):
            found.setdefault(sum(1 << node for node in some))
    return found


def icd_sets(size: int) -> Callable[[Pag], Callable[[int, int], Candidates]]:
    """Sets of `size` nodes that may separate x and y (ICD-Sep): all of one PDS-tree, that of x or that of y.

    They are closed along its paths, and each member is a possible ancestor of x or of y. The cost of a set is the sum
    of its members' depths in the tree.
    """

    def of(graph: Pag) -> Callable[[int, int], Candidates]:
        ancestors = graph.possible_ancestors()
        trees: dict[int, dict[int, int]] = {}

        def candidates(x: int, y: int) -> Candidates:
            pool = (ancestors[x] | ancestors[y]) & ~(1 << x | 1 << y)
            found: dict[int, int] = {}
            for root in (x, y):
                if pool.bit_count() < size:
                    break
                if root not in trees:
                    trees[root] = depths(graph, root)
                depth = trees[root]
                for z in _last(graph, root, pool, size):
                    cost = sum([depth[node] for node in members(z)])
                    found[z] = min(cost, found.get(z, cost))
            return sorted(((cost, z) for z, cost in found.items()), key=lambda one: one[0])

        return candidates

    return of


def _last(graph: Pag, root: int, pool: int, size: int) -> list[int]:
    """Closed sets of exactly `size` nodes."""
    levels = list(closed_sets(graph, root, pool, size))
    return levels[-1] if len(levels) == size else []
