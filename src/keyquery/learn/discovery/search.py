"""From tests of independence to a partial ancestral graph: ICD, and FCI as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from keyquery.learn.discovery.independence import Test
from keyquery.learn.discovery.knowledge import Knowledge, knowledge_of
from keyquery.learn.discovery.pag import Pag, members
from keyquery.learn.discovery.rounds import Candidates, Rounds, Sets
from keyquery.learn.discovery.rules import arrowheads, finish, orient
from keyquery.learn.discovery.trees import closed_sets, depths
from keyquery.support.progress import Progress, silent

RECHECKED = 3  # neighbours that a cautious search conditions on in the end


@dataclass(frozen=True)
class Found:
    """The result of a search: graph, number of rounds, whether it was completed, and the separating sets."""

    graph: Pag  # the oriented graph
    rounds: int  # completed
    done: bool  # whether the search was completed
    separations: dict[tuple[int, int], int]  # by pair, the mask of a separating set


def icd(
    test: Test,
    rounds: int | None = None,
    order_free: bool = True,
    selection: bool = False,
    tails: bool = True,
    tiers: Sequence[int] | None = None,
    progress: Progress = silent,
    knowledge: Knowledge | None = None,
    cautious: bool = False,
) -> Found:
    """Iterative causal discovery (ICD): the graph after `rounds` rounds. Default: all.

    `tiers` is background knowledge: no node is an ancestor of one in an earlier tier; `knowledge` is more of it, of
    `knowledge_of`. `progress` reports each round.

    Parameters
    ----------
    test
        An independence test: `PartialCorrelation`, `DSeparation` or one of your own.
    rounds
        Default: all.
    order_free
        Delete edges at the end of a round, so that the result does not depend on the order of the nodes.
    selection
        Allow for selection bias.
    tails
        Apply the rules R8–R10.
    tiers
        Tier of each node: no node is an ancestor of one in an earlier tier. Default: none.
    progress
        Reports each round. Default: none.
    knowledge
        More background knowledge, of `knowledge_of`. Default: none.
    cautious
        For tests that err: colliders are decided by `decided`, and neighbours of a complete graph are tested once more,
        given up to three neighbours of either. Default: no.

    Returns
    -------
    Found
        Graph, rounds, whether the search was completed, and separating sets.

    Examples
    --------
    >>> import networkx
    >>> from keyquery.learn.discovery import DSeparation
    >>> icd(DSeparation(networkx.DiGraph([(0, 2), (1, 2), (2, 3)]), range(4))).graph.edges()
    [(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow'), (2, 3, 'tail', 'arrow')]
    >>> icd(DSeparation(networkx.DiGraph([(0, 1), (1, 2)]), range(3)), tiers=[0, 1, 2]).graph.edges()
    [(0, 1, 'circle', 'arrow'), (1, 2, 'tail', 'arrow')]
    """
    known = _known(test, tiers, knowledge, selection)
    for result in _icd_rounds(test, known, order_free, cautious, progress):
        if result.done or result.rounds == rounds:
            break
    return result.finished(selection, tails, known)


def icd_rounds(
    test: Test,
    order_free: bool = True,
    selection: bool = False,
    tails: bool = True,
    tiers: Sequence[int] | None = None,
    progress: Progress = silent,
    knowledge: Knowledge | None = None,
    cautious: bool = False,
) -> Iterator[Found]:
    """The graph after each round; round r conditions on sets of r nodes.

    Each graph is valid for the tests so far: the search can be stopped at any time. Candidates of round 0 are the empty
    set, of round 1 single neighbours of either node, later those of `icd_sets`. With `order_free`, edges are deleted at
    the end of a round, and the best of the cheapest separating sets is kept. No set contains a node that is known
    to be an ancestor of neither, such as one that is later than both: their ancestors separate them.

    Parameters
    ----------
    test
        An independence test: `PartialCorrelation`, `DSeparation` or one of your own.
    order_free
        Delete edges at the end of a round, so that the result does not depend on the order of the nodes.
    selection
        Allow for selection bias.
    tails
        Apply the rules R8–R10.
    tiers
        Tier of each node: no node is an ancestor of one in an earlier tier. Default: none.
    progress
        Reports each round. Default: none.
    knowledge
        More background knowledge, of `knowledge_of`. Default: none.
    cautious
        For tests that err: colliders are decided by `decided`, and neighbours of a complete graph are tested once more,
        given up to three neighbours of either. Default: no.

    Returns
    -------
    iterator of Found
        One per round.
    """
    known = _known(test, tiers, knowledge, selection)
    for result in _icd_rounds(test, known, order_free, cautious, progress):
        yield result.finished(selection, tails, known)


@dataclass(frozen=True)
class _Unfinished(Found):
    """After a round: the graph with its arrowheads."""

    colliders: Mapping[tuple[int, int], int]  # by pair, the mask of nodes that are none

    def finished(self, selection: bool, tails: bool, known: Knowledge) -> Found:
        graph = finish(self.graph, self.colliders, selection, tails, known)
        return Found(graph, self.rounds, self.done, self.separations)


def _icd_rounds(
    test: Test, known: Knowledge, order_free: bool, cautious: bool, progress: Progress
) -> Iterator[_Unfinished]:
    graph, run, size, last = Pag.complete(test.count), Rounds(test, known, order_free, cautious, progress), 0, False
    while not last:
        # From size 2 on, sets contain only possible ancestors, which are never later than both.
        sets = icd_sets(size) if size > 1 else _neighbours(size, known)
        had_candidates = run(graph, sets, size)
        last = (size > 0 and not had_candidates) or size >= test.most
        if last and cautious:
            for few in range(1, min(RECHECKED, test.most) + 1):
                run(graph, _neighbours(few, known), few)
        colliders = run.colliders(graph, last)
        if size < 2 or had_candidates or cautious:
            graph = arrowheads(graph, colliders, known)
        size += 1
        yield _Unfinished(graph.copy(), size, last, dict(run.separations), colliders)


def fci(
    test: Test,
    order_free: bool = True,
    selection: bool = False,
    tails: bool = True,
    tiers: Sequence[int] | None = None,
    progress: Progress = silent,
    knowledge: Knowledge | None = None,
    cautious: bool = False,
) -> Found:
    """Fast causal inference: subsets of neighbours by size, then subsets of the possible d-separating sets.

    `tiers`, `knowledge` and `progress` as in `icd`.

    Parameters
    ----------
    test
        An independence test: `PartialCorrelation`, `DSeparation` or one of your own.
    order_free
        Delete edges at the end of a round, so that the result does not depend on the order of the nodes.
    selection
        Allow for selection bias.
    tails
        Apply the rules R8–R10.
    tiers
        Tier of each node: no node is an ancestor of one in an earlier tier. Default: none.
    progress
        Reports each round. Default: none.
    knowledge
        More background knowledge, of `knowledge_of`. Default: none.
    cautious
        For tests that err: colliders are decided by `decided`, and neighbours of a complete graph are tested once more,
        given up to three neighbours of either. Default: no.

    Returns
    -------
    Found
        Graph, rounds, whether the search was completed, and separating sets.

    Examples
    --------
    >>> import networkx
    >>> from keyquery.learn.discovery import DSeparation
    >>> fci(DSeparation(networkx.DiGraph([(0, 2), (1, 2), (2, 3)]), range(4))).graph.edges()
    [(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow'), (2, 3, 'tail', 'arrow')]
    """
    known = _known(test, tiers, knowledge, selection)
    graph, run = Pag.complete(test.count), Rounds(test, known, order_free, cautious, progress)
    size = 0
    for size in range(test.most + 1):
        if not run(graph, _neighbours(size, known), size):
            break
    colliders = orient(graph, run.colliders(graph), tails=False, knowledge=known)
    reached = [sum(1 << x for x in depths(colliders, root)) for root in range(test.count)]
    for size in range(1, test.most + 1):
        if not run(graph, _subsets(reached, size, known), size):
            break
    whole = orient(graph, run.colliders(graph, last=True), selection, tails, known)
    return Found(whole, size + 1, True, dict(run.separations))


def _known(test: Test, tiers: Sequence[int] | None, knowledge: Knowledge | None, selection: bool) -> Knowledge:
    """Background knowledge; none with selection: any node may be an ancestor of a selection variable."""
    if selection and tiers is not None:
        raise ValueError("tiers and selection exclude each other: a selection variable may come later than all nodes")
    if selection and knowledge:
        raise ValueError("background knowledge and selection exclude each other: any node may affect the selection")
    if tiers is not None and knowledge is not None:
        raise ValueError("pass either tiers or knowledge, not both: knowledge_of takes tiers")
    known = knowledge_of(test.count, tiers) if knowledge is None else knowledge
    if len(known.barred) != test.count:
        raise ValueError(f"knowledge must be about the {test.count} nodes of the test, got {len(known.barred)}")
    return known


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
            for root in (x, y):
                if pool.bit_count() < size:
                    break
                if root not in trees:
                    trees[root] = depths(graph, root)
                depth = trees[root]
                for z in _last(graph, root, pool, size):
                    cost = sum([depth[node] for node in members(z)])
                    costs[z] = min(cost, costs.get(z, cost))
            return sorted(((cost, z) for z, cost in costs.items()), key=lambda pair: pair[0])

        return candidates

    return of


def _last(graph: Pag, root: int, pool: int, size: int) -> list[int]:
    """Closed sets of exactly `size` nodes."""
    levels = list(closed_sets(graph, root, pool, size))
    return levels[-1] if len(levels) == size else []
