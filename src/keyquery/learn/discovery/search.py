"""From tests of independence to a partial ancestral graph: ICD, and FCI as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from time import perf_counter
from typing import Any

import numpy as np

from keyquery.learn.discovery.independence import PartialCorrelation, Test
from keyquery.learn.discovery.knowledge import Knowledge, knowledge_of
from keyquery.learn.discovery.pag import Pag, members
from keyquery.learn.discovery.rounds import Candidates, Rounds, Sets
from keyquery.learn.discovery.rules import arrowheads, finish, orient
from keyquery.learn.discovery.trees import closed_sets, depths
from keyquery.support.progress import Progress, silent

RECHECKED = 3  # neighbours that a cautious search conditions on in the end
TIMED = 12  # nodes of the search that durations are estimated from


@dataclass(frozen=True)
class Options:
    """What `icd`, `icd_rounds` and `fci` have in common."""

    selection: bool = False  # allow for selection bias: rules R5–R7
    tiers: Sequence[int] | None = None  # one per node: no node is an ancestor of one in an earlier tier
    knowledge: Knowledge | None = None  # more of it, of `knowledge_of`
    cautious: bool = False  # for tests that err: colliders are tested once more, and pairs of the complete graph too
    progress: Progress = silent

    def known(self, test: Test) -> Knowledge:
        """Background knowledge; none with selection: any node may be an ancestor of a selection variable."""
        if self.selection and self.tiers is not None:
            raise ValueError(
                "tiers and selection exclude each other: a selection variable may come later than all nodes"
            )
        if self.selection and self.knowledge:
            raise ValueError("background knowledge and selection exclude each other: any node may affect the selection")
        if self.tiers is not None and self.knowledge is not None:
            raise ValueError("pass either tiers or knowledge, not both: knowledge_of takes tiers")
        known = knowledge_of(test.count, self.tiers) if self.knowledge is None else self.knowledge
        if len(known.barred) != test.count:
            raise ValueError(f"knowledge must be about the {test.count} nodes of the test, got {len(known.barred)}")
        return known


@dataclass(frozen=True)
class Found:
    """The result of a search: graph, number of rounds, whether it was completed, and the separating sets."""

    oriented: Callable[[], Pag]
    rounds: int  # completed
    done: bool  # whether the search was completed
    separations: dict[tuple[int, int], int]  # by pair, the mask of a separating set

    @cached_property
    def graph(self) -> Pag:
        """The oriented graph; its tails are found when it is first asked for."""
        return self.oriented()


def icd(test: Test, rounds: int | None = None, **options: Any) -> Found:
    """Iterative causal discovery (ICD): the graph after `rounds` rounds. Default: all.

    `options` are fields of `Options`: `selection`, `tiers`, `knowledge`, `cautious` and `progress`.

    >>> import networkx
    >>> from keyquery.learn.discovery import DSeparation
    >>> icd(DSeparation(networkx.DiGraph([(0, 2), (1, 2), (2, 3)]), range(4))).graph.edges()
    [(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow'), (2, 3, 'tail', 'arrow')]
    >>> icd(DSeparation(networkx.DiGraph([(0, 1), (1, 2)]), range(3)), tiers=[0, 1, 2]).graph.edges()
    [(0, 1, 'circle', 'arrow'), (1, 2, 'tail', 'arrow')]
    """
    return next(result for result in icd_rounds(test, **options) if result.done or result.rounds == rounds)


def icd_rounds(test: Test, **options: Any) -> Iterator[Found]:
    """The graph after each round of ICD; round r conditions on sets of r nodes. Options as in `icd`.

    Each graph is valid for the tests so far: the search can be stopped at any time. Candidates of round 0 are the empty
    set, of round 1 single neighbours of either node, later those of `icd_sets`. No set contains a node that is known
    to be an ancestor of neither, such as one that is later than both: their ancestors separate them.
    """
    settings = Options(**options)
    known = settings.known(test)
    graph, run = Pag.complete(test.count), Rounds(test, known, settings.cautious, settings.progress)
    size, last = 0, False
    while not last:
        # From size 2 on, sets contain only possible ancestors, which are never later than both.
        had_candidates = run(graph, icd_sets(size) if size > 1 else _neighbours(size, known), size)
        last = (size > 0 and not had_candidates) or size >= test.most
        if last and settings.cautious:
            for count in range(1, min(RECHECKED, test.most) + 1):
                run(graph, _neighbours(count, known), count)
        colliders = run.colliders(graph, last)
        if size < 2 or had_candidates or settings.cautious:
            graph = arrowheads(graph, colliders, known)
        size += 1
        oriented = partial(finish, graph.copy(), colliders, settings.selection, known)
        yield Found(oriented, size, last, dict(run.separations))


def fci(test: Test, **options: Any) -> Found:
    """Fast causal inference: subsets of neighbours by size, then subsets of the possible d-separating sets.

    Options as in `icd`.

    >>> import networkx
    >>> from keyquery.learn.discovery import DSeparation
    >>> fci(DSeparation(networkx.DiGraph([(0, 2), (1, 2), (2, 3)]), range(4))).graph.edges()
    [(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow'), (2, 3, 'tail', 'arrow')]
    """
    settings = Options(**options)
    known = settings.known(test)
    graph, run, size = Pag.complete(test.count), Rounds(test, known, settings.cautious, settings.progress), 0
    for size in range(test.most + 1):
        if not run(graph, _neighbours(size, known), size):
            break
    colliders = arrowheads(graph, run.colliders(graph), known)
    reached = [sum(1 << x for x in depths(colliders, root)) for root in range(test.count)]
    for size in range(1, test.most + 1):
        if not run(graph, _subsets(reached, size, known), size):
            break
    whole = orient(graph, run.colliders(graph, last=True), settings.selection, known)
    return Found(lambda: whole, size + 1, True, dict(run.separations))


def _neighbours(size: int, known: Knowledge) -> Sets:
    """Sets of neighbours of x, then of y; all cost the same."""
    return lambda graph: _subsets(graph.adjacent, size, known)(graph)


def _subsets(pools: Sequence[int], size: int, known: Knowledge) -> Sets:
    """Sets of nodes of the pool of x, then of that of y; all cost the same."""

    def candidates(x: int, y: int) -> Candidates:
        usable = ~(1 << x | 1 << y | (known.barred[x] & known.barred[y]))
        sets: dict[int, None] = {}
        for pool in (pools[x], pools[y]):
            for nodes in combinations(members(pool & usable), size):
                sets.setdefault(sum(1 << node for node in nodes))
        return [(0, z) for z in sets]

    return lambda graph: candidates


def icd_sets(size: int) -> Sets:
    """Candidate separating sets of `size` nodes (ICD-Sep), within the PDS-tree of x or that of y.

    They are path-closed, and each member is a possible ancestor of x or y. The cost of a set is the sum
    of its members' depths in the tree.
    """

    def of(graph: Pag) -> Callable[[int, int], Candidates]:
        ancestors = graph.possible_ancestors()
        trees: dict[int, dict[int, int]] = {}

        def candidates(x: int, y: int) -> Candidates:
            pool = (ancestors[x] | ancestors[y]) & ~(1 << x | 1 << y)
            costs: dict[int, int] = {}
            for root in (x, y) if pool.bit_count() >= size else ():
                if root not in trees:
                    trees[root] = depths(graph, root)
                depth, levels = trees[root], list(closed_sets(graph, root, pool, size))
                for z in levels[-1] if len(levels) == size else ():
                    cost = sum([depth[node] for node in members(z)])
                    costs[z] = min(cost, costs.get(z, cost))
            return sorted(((cost, z) for z, cost in costs.items()), key=lambda pair: pair[0])

        return candidates

    return of


def expected_seconds(test: PartialCorrelation) -> float:
    """Estimated seconds to test all adjacent pairs given each single neighbour, from the time of a small search.

    Most tests of a dense graph have this size. Their number is Σ |adj(x) ∪ adj(y)| − 2 over marginally dependent pairs;
    larger sets and orientation are not included. 0 for small graphs.

    >>> expected_seconds(PartialCorrelation(np.eye(3), 768, 0.01))
    0.0
    """
    if test.count <= TIMED:
        return 0.0
    small = PartialCorrelation(test.correlation[:TIMED, :TIMED], test.samples, 1 - 1e-9)  # hardly any is independent
    start = perf_counter()
    icd(small, rounds=2)
    seconds = (perf_counter() - start) / max(small.tests, 1)
    with np.errstate(divide="ignore"):
        strength = np.arctanh(np.minimum(np.abs(test.correlation), 1.0)) * np.sqrt(max(test.samples - 3, 0.0))
    near = (strength >= test.threshold).astype(np.float32)
    np.fill_diagonal(near, 0.0)
    degrees = near.sum(1)
    either = degrees[:, None] + degrees - near @ near - 2
    return seconds * int((either * near).sum(dtype=np.float64) / 2)
