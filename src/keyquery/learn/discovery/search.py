"""From tests of independence to a partial ancestral graph: ICD, and FCI as the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

from keyquery.learn.discovery.independence import IndependenceTest, Query
from keyquery.learn.discovery.knowledge import Knowledge, knowledge_of
from keyquery.learn.discovery.pag import Pag, closed_sets, depths, members
from keyquery.learn.discovery.rules import Separations, orient, orient_arrowheads
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.progress import Progress, silent

METHODS = ("icd", "fci")
RECHECKED = 3  # neighbours that a cautious search conditions on in the end
BATCH = 64  # pairs tested at once
# Candidate separating sets of a pair, each with its rank: a cost, or a cost and a weakness; lower ones are tried first.
Candidates = list[tuple[Any, int]]
CandidatesOf = Callable[[int, int], Candidates]


class SearchResult(NamedTuple):
    """The graph of a search, and its effort as readings store it."""

    graph: Pag
    effort: dict[str, Any]  # tests, also by size of the conditioning set, rounds, and whether the search was completed


def check_search(method: str, alpha: float, rounds: int | None) -> None:
    """Refuse bad options of a search."""
    check_choice("method", method, METHODS)
    check_number("alpha", alpha)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    check_count("rounds", rounds, optional=True)
    if rounds is not None and method != "icd":
        raise ValueError('rounds is only for method="icd", whose graph is valid after every round, not "fci"')


def search(
    test: IndependenceTest,
    method: str = "icd",
    rounds: int | None = None,
    *,
    selection: bool = False,
    knowledge: Knowledge | None = None,
    cautious: bool = False,
    progress: Progress = silent,
) -> SearchResult:
    """The graph by iterative causal discovery ("icd", valid after every round) or fast causal inference ("fci").

    `selection` allows for selection bias; `cautious` is for tests that err: colliders are tested once more, and in ICD
    pairs of the complete graph too.
    """
    if selection and knowledge:
        raise ValueError("background knowledge and selection exclude each other: any node may affect the selection")
    run = Rounds(test, knowledge or knowledge_of(test.count), cautious, progress)
    count, done = _icd(run, rounds) if method == "icd" else _fci(run)
    orient(run.graph, run.colliders(done), selection, run.known)
    by_size = [test.by_size[size] for size in range(max(test.by_size, default=-1) + 1)]
    effort = {"tests": test.by_size.total(), "tests_by_size": by_size, "rounds": count, "done": done}
    return SearchResult(run.graph, effort)


def _icd(run: Rounds, rounds: int | None) -> tuple[int, bool]:
    """Round r conditions on r nodes. Returns the number of rounds, and whether the search was completed."""
    size, done = 0, False
    while not done and size != rounds:
        if size:
            orient_arrowheads(run.graph, run.colliders(), run.known)
        # From size 2 on, sets contain only possible ancestors, which are never later than both.
        sets = icd_sets(run.graph, size) if size > 1 else run.subsets(run.graph.adjacent, size)
        had_candidates = run(sets, size)
        done = size >= run.test.most or (size > 0 and not had_candidates)
        size += 1
    for size_again in range(1, min(RECHECKED, run.test.most) + 1) if done and run.cautious else ():
        run(run.subsets(run.graph.adjacent, size_again), size_again)
    return size, done


def _fci(run: Rounds) -> tuple[int, bool]:
    """Subsets of neighbours by size, then subsets of the possible d-separating sets."""
    size = 0
    for size in range(run.test.most + 1):
        if not run(run.subsets(run.graph.adjacent, size), size):
            break
    orient_arrowheads(run.graph, run.colliders(), run.known)
    reached = [sum(1 << x for x in depths(run.graph, root)) for root in range(run.test.count)]
    for size in range(1, run.test.most + 1):
        if not run(run.subsets(reached, size), size):
            break
    return size + 1, True


def icd_sets(graph: Pag, size: int) -> CandidatesOf:
    """Possible ancestors that are closed along PDS-paths from x or y (ICD-Sep); the cost is the sum of their depths."""
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
    """The rounds of a search: edges are deleted at the end of each, so that the order of nodes does not matter.

    Of the cheapest separating sets the one with the least remaining dependence is kept. A cautious round tries sets
    that depend on both x and y most first, and then only others of the same cost with a common neighbour of them.
    """

    def __init__(self, test: IndependenceTest, known: Knowledge, cautious: bool, progress: Progress) -> None:
        self.test, self.known, self.cautious, self.progress = test, known, cautious, progress
        self.graph = Pag.complete(test.count)
        self.separations: dict[tuple[int, int], int] = {}  # by pair, the mask of a separating set
        self.unions: dict[tuple[int, int], int] = {}  # of all separating sets of its round
        self.strengths: list[list[float]] = []  # of dependence, given nothing

    def __call__(self, candidates_of: CandidatesOf, size: int) -> bool:
        """Test every adjacent pair given sets of `size` nodes; returns whether there were any."""
        graph, cautious = self.graph, self.cautious and size > 0
        pairs = [pair for pair in graph.pairs() if not self.known.keeps(*pair)]
        batches = [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]
        tested, removed = False, []
        for batch in self.progress(batches, f"sets of {size} token{'' if size == 1 else 's'}", len(batches)):
            todo = [(x, y, candidates_of(x, y)) for x, y in batch]
            self.test.prepare(Query(x, y, mask) for x, y, candidates in todo for _, mask in candidates)
            for x, y, candidates in todo:
                tested = tested or bool(candidates)
                ranked = self._ranked(x, y, candidates) if cautious else candidates
                separating, union, end = self._first_rank(x, y, ranked)
                if separating is not None:
                    rest = [z for rank, z in ranked[end:] if rank[0] == ranked[end - 1][0][0]] if cautious else []
                    removed.append((x, y, separating, union, rest))
        for x, y, *_ in removed:
            graph.remove(x, y)
        for x, y, separating, union, rest in removed:
            if cautious:
                common = graph.adjacent[x] & graph.adjacent[y]
                further = [(0, separating), *((0, z) for z in rest if z & common)]
                best, more, _ = self._first_rank(x, y, further)
                separating, union = separating if best is None else best, union | more
            self.separations[x, y], self.unions[x, y] = separating, union
        return tested

    def subsets(self, pools: Sequence[int], size: int) -> CandidatesOf:
        """Sets of nodes of the pool of x, then of that of y; all cost the same."""

        def candidates(x: int, y: int) -> Candidates:
            usable = ~(1 << x | 1 << y | (self.known.barred[x] & self.known.barred[y]))
            nodes = (combinations(members(pool & usable), size) for pool in (pools[x], pools[y]))
            return [(0, z) for z in dict.fromkeys(sum(1 << node for node in z) for z in chain(*nodes))]

        return candidates

    def colliders(self, last: bool = False) -> Separations:
        """By pair, the mask of nodes that are no colliders between them; `last` after all rounds.

        Tests that err disagree: a common neighbour in some separating sets of a round, but not in the best one, is left
        undecided. Any other is a collider if x and y are more independent without it.
        """
        if not (self.cautious and last):
            return Separations(self.unions if self.cautious else self.separations)
        between, undecided = {}, {}
        for (x, y), best in self.separations.items():
            common = self.graph.adjacent[x] & self.graph.adjacent[y] & ~(self.known.barred[x] & self.known.barred[y])
            unsure = undecided[x, y] = common & self.unions[x, y] & ~best
            flipped = 0
            for node in members(common & ~unsure):
                other = best ^ 1 << node
                if other.bit_count() <= self.test.most:
                    least = min(self.test.threshold, self.test.statistic(Query(x, y, best)))
                    flipped |= (self.test.statistic(Query(x, y, other)) < least) << node
            between[x, y] = best ^ flipped
        return Separations(between, undecided)

    def _ranked(self, x: int, y: int, candidates: Candidates) -> Candidates:
        """Candidates by cost, and then by how strongly their nodes depend on both x and y."""
        self.strengths = self.strengths or [
            [self._strength(a, b) for b in range(len(self.graph))] for a in range(len(self.graph))
        ]
        least = list(map(min, self.strengths[x], self.strengths[y]))
        return sorted(((cost, -math.fsum([least[node] for node in members(z)])), z) for cost, z in candidates)

    def _strength(self, x: int, y: int) -> float:
        """How strongly a pair depends, given nothing; required edges, which are not tested, most."""
        if x == y or self.known.keeps(x, y):
            return math.inf
        return self.test.statistic(Query(min(x, y), max(x, y), 0))

    def _first_rank(self, x: int, y: int, ranked: Candidates) -> tuple[int | None, int, int]:
        """The best of the first separating sets that rank equally, the union of these, and the index after them."""
        best, separating, first, union = self.test.threshold, None, None, 0
        for index, (rank, z) in enumerate(ranked):
            if separating is not None and rank != first:
                return separating, union, index
            statistic = self.test.statistic(Query(x, y, z))
            if statistic < self.test.threshold:
                union |= z
            if statistic < best:
                best, separating, first = statistic, z, rank
        return separating, union, len(ranked)
