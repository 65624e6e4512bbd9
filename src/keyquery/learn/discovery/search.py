"""From tests of independence to a partial ancestral graph: ICD, and FCI as the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from keyquery.learn.discovery.independence import IndependenceTest, Query
from keyquery.learn.discovery.knowledge import Knowledge, knowledge_of
from keyquery.learn.discovery.pag import Pag, members
from keyquery.learn.discovery.rules import Separations, arrowheads, finish, orient
from keyquery.learn.discovery.trees import closed_sets, depths
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.progress import Progress, silent

METHODS = ("icd", "fci")
RECHECKED = 3  # neighbours that a cautious search conditions on in the end
BATCH = 64  # pairs tested at once
# Candidate separating sets of a pair, each with its rank: a cost, or a cost and a weakness; lower ones are tried first.
Candidates = list[tuple[Any, int]]
CandidatesOf = Callable[[int, int], Candidates]


@dataclass(frozen=True)
class Settings:
    """A validated search of `kq.causes` and `kq.discover`."""

    method: str
    alpha: float
    rounds: int | None
    selection: bool

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_number("alpha", self.alpha)
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        check_count("rounds", self.rounds, optional=True)
        if self.rounds is not None and self.method != "icd":
            raise ValueError('rounds is only for method="icd", whose graph is valid after every round, not "fci"')

    def search(self, test: IndependenceTest, **options: Any) -> tuple[Pag, dict[str, Any]]:
        """The graph by this method, and the effort as readings store it."""
        result = (
            fci(test, selection=self.selection, **options)
            if self.method == "fci"
            else icd(test, self.rounds, selection=self.selection, **options)
        )
        by_size = [test.by_size[size] for size in range(max(test.by_size, default=-1) + 1)]
        facts = {"tests": test.tests, "tests_by_size": by_size, "rounds": result.rounds, "done": result.done}
        return result.graph, facts


class Found(NamedTuple):
    """The result of a search: graph, number of rounds, whether it was completed, and the separating sets by pair."""

    graph: Pag
    rounds: int
    done: bool
    separations: dict[tuple[int, int], int]


def icd(
    test: IndependenceTest,
    rounds: int | None = None,
    *,
    selection: bool = False,
    knowledge: Knowledge | None = None,
    cautious: bool = False,
    progress: Progress = silent,
) -> Found:
    """Iterative causal discovery (ICD): the graph after `rounds` rounds, default all; round r conditions on r nodes.

    The graph is valid for the tests so far. `selection` allows for selection bias; `cautious` is for tests that err:
    colliders are tested once more, and pairs of the complete graph too. Candidates of round 0 are the empty set, of
    round 1 single neighbours of either node, later those of `icd_sets`.
    """
    known = _known(test, selection, knowledge)
    graph, run = Pag.complete(test.count), Rounds(test, known, cautious, progress)
    size, last = 0, False
    while not last and size != rounds:
        # From size 2 on, sets contain only possible ancestors, which are never later than both.
        had_candidates = run(graph, icd_sets(graph, size) if size > 1 else _subsets(graph.adjacent, size, known), size)
        last = (size > 0 and not had_candidates) or size >= test.most
        if last and cautious:
            for count in range(1, min(RECHECKED, test.most) + 1):
                run(graph, _subsets(graph.adjacent, count, known), count)
        colliders = run.colliders(graph, last)
        if size < 2 or had_candidates or cautious:
            graph = arrowheads(graph, colliders, known)
        size += 1
    return Found(finish(graph, colliders, selection, known), size, last, run.separations)


def fci(
    test: IndependenceTest,
    *,
    selection: bool = False,
    knowledge: Knowledge | None = None,
    cautious: bool = False,
    progress: Progress = silent,
) -> Found:
    """Fast causal inference: subsets of neighbours by size, then subsets of the possible d-separating sets."""
    known = _known(test, selection, knowledge)
    graph, run, size = Pag.complete(test.count), Rounds(test, known, cautious, progress), 0
    for size in range(test.most + 1):
        if not run(graph, _subsets(graph.adjacent, size, known), size):
            break
    colliders = arrowheads(graph, run.colliders(graph), known)
    reached = [sum(1 << x for x in depths(colliders, root)) for root in range(test.count)]
    for size in range(1, test.most + 1):
        if not run(graph, _subsets(reached, size, known), size):
            break
    whole = orient(graph, run.colliders(graph, last=True), selection, known)
    return Found(whole, size + 1, True, run.separations)


def _known(test: IndependenceTest, selection: bool, knowledge: Knowledge | None) -> Knowledge:
    """Background knowledge; none with selection: any node may be an ancestor of a selection variable."""
    if selection and knowledge:
        raise ValueError("background knowledge and selection exclude each other: any node may affect the selection")
    return knowledge or knowledge_of(test.count)


def _subsets(pools: Sequence[int], size: int, known: Knowledge) -> CandidatesOf:
    """Sets of nodes of the pool of x, then of that of y; all cost the same."""

    def candidates(x: int, y: int) -> Candidates:
        usable = ~(1 << x | 1 << y | (known.barred[x] & known.barred[y]))
        sets: dict[int, None] = {}
        for pool in (pools[x], pools[y]):
            for nodes in combinations(members(pool & usable), size):
                sets.setdefault(sum(1 << node for node in nodes))
        return [(0, z) for z in sets]

    return candidates


def icd_sets(graph: Pag, size: int) -> CandidatesOf:
    """Candidate separating sets of `size` nodes (ICD-Sep): possible ancestors, path-closed in the PDS-tree of x or y.

    The cost of a set is the sum of its members' depths in the tree.
    """
    ancestors, trees = graph.possible_ancestors(), dict[int, dict[int, int]]()

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


class Rounds:
    """The rounds of a search and the separating sets that they found.

    Edges are deleted at the end of a round, so that the order of nodes does not matter. Of the cheapest separating sets
    the one with the least remaining dependence is kept. A cautious round tries sets of nodes that depend on both x and
    y most first, and after the first that separates them only others of its cost with a common neighbour of x and y.
    """

    def __init__(self, test: IndependenceTest, known: Knowledge, cautious: bool, progress: Progress) -> None:
        self.test, self.known, self.cautious, self.progress = test, known, cautious, progress
        self.separations: dict[tuple[int, int], int] = {}  # by pair, the mask of a separating set
        self.unions: dict[tuple[int, int], int] = {}  # of all separating sets of its round
        self.strengths: list[list[float]] = []  # of dependence, given nothing

    def __call__(self, graph: Pag, candidates_of: CandidatesOf, size: int) -> bool:
        """Test every adjacent pair given sets of `size` nodes; returns whether there were any."""
        cautious = self.cautious and size > 0
        tested, removed = False, []
        for batch in self._batches(graph, size):
            todo = [(x, y, candidates_of(x, y)) for x, y in batch]
            self.test.prepare(Query(x, y, mask) for x, y, candidates in todo for _, mask in candidates)
            for x, y, candidates in todo:
                tested = tested or bool(candidates)
                ranked = self._ranked(x, y, candidates) if cautious else candidates
                separating, union, end = _first_rank(self.test, x, y, ranked)
                if separating is not None:
                    rest = [z for rank, z in ranked[end:] if rank[0] == ranked[end - 1][0][0]] if cautious else []
                    removed.append((x, y, separating, union, rest))
        for x, y, *_ in removed:
            graph.remove(x, y)
        for x, y, separating, union, rest in removed:
            if cautious:
                common = graph.adjacent[x] & graph.adjacent[y]
                further = [(0, separating), *((0, z) for z in rest if z & common)]
                best, more, _ = _first_rank(self.test, x, y, further)
                separating, union = separating if best is None else best, union | more
            self.separations[x, y], self.unions[x, y] = separating, union
        return tested

    def colliders(self, graph: Pag, last: bool = False) -> Separations:
        """By pair, the mask of nodes that are no colliders between them; `last` after all rounds.

        Tests that err disagree: a common neighbour that some separating sets of a round contain, but not the best one,
        is left undecided. Any other is tested with and without: it is a collider if x and y are more independent
        without it.
        """
        if not self.cautious:
            return Separations(self.separations)
        if not last:
            return Separations(self.unions)
        decided = Separations({})
        for (x, y), best in self.separations.items():
            common = graph.adjacent[x] & graph.adjacent[y] & ~(self.known.barred[x] & self.known.barred[y])
            unsure = decided.unsure[x, y] = common & self.unions[x, y] & ~best
            flipped = 0
            for node in members(common & ~unsure):
                other = best ^ 1 << node
                if other.bit_count() <= self.test.most:
                    least = min(self.test.threshold, self.test.statistic(Query(x, y, best)))
                    flipped |= (self.test.statistic(Query(x, y, other)) < least) << node
            decided[x, y] = best ^ flipped
        return decided

    def _batches(self, graph: Pag, size: int) -> Iterable[list[tuple[int, int]]]:
        pairs = [pair for pair in graph.pairs() if not self.known.keeps(*pair)]
        batches = [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]
        return self.progress(batches, f"sets of {size} token{'' if size == 1 else 's'}", len(batches))

    def _ranked(self, x: int, y: int, candidates: Candidates) -> Candidates:
        """Candidates by cost, and then by how strongly their nodes depend on both x and y."""
        self.strengths = self.strengths or self._strengths()
        least = list(map(min, self.strengths[x], self.strengths[y]))
        return sorted(((cost, -math.fsum([least[node] for node in members(z)])), z) for cost, z in candidates)

    def _strengths(self) -> list[list[float]]:
        """How strongly each pair depends, given nothing; required edges, which are not tested, most."""
        table = [[math.inf] * self.test.count for _ in range(self.test.count)]
        for x in range(self.test.count):
            for y in range(x + 1, self.test.count):
                if not self.known.keeps(x, y):
                    table[x][y] = table[y][x] = self.test.statistic(Query(x, y, 0))
        return table


def _first_rank(test: IndependenceTest, x: int, y: int, ranked: Candidates) -> tuple[int | None, int, int]:
    """The best of the first separating sets that rank equally, the union of these, and the index after them."""
    best, separating, first, union = test.threshold, None, None, 0
    for index, (rank, z) in enumerate(ranked):
        if separating is not None and rank != first:
            return separating, union, index
        statistic = test.statistic(Query(x, y, z))
        if statistic < test.threshold:
            union |= z
        if statistic < best:
            best, separating, first = statistic, z, rank
    return separating, union, len(ranked)
