"""Rounds of a search: adjacent pairs are tested given candidate sets, and separated ones lose their edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from keyquery.learn.discovery.independence import Query, Test
from keyquery.learn.discovery.knowledge import Knowledge
from keyquery.learn.discovery.pag import Pag, members
from keyquery.learn.discovery.rules import Separations
from keyquery.support.progress import Progress

# Candidate separating sets of a pair, each with its rank: a cost, or a cost and a weakness; lower ones are tried first.
Candidates = list[tuple[Any, int]]
Sets = Callable[[Pag], Callable[[int, int], Candidates]]
BATCH = 64  # pairs tested at once


class Rounds:
    """The rounds of a search and the separating sets that they found.

    Edges are deleted at the end of a round, so that the order of nodes does not matter. Of the cheapest separating sets
    the one with the least remaining dependence is kept. A cautious round tries sets of nodes that depend on both x and
    y most first, stops at the first that separates them, and of the others of this cost tests those with a common
    neighbour of x and y: only these can be colliders.
    """

    def __init__(self, test: Test, known: Knowledge, cautious: bool, progress: Progress) -> None:
        self.test, self.known, self.cautious, self.progress = test, known, cautious, progress
        self.separations: dict[tuple[int, int], int] = {}  # by pair, the mask of a separating set
        self.unions: dict[tuple[int, int], int] = {}  # of all separating sets of its round
        self.strengths: list[list[float]] = []  # of dependence, given nothing

    def __call__(self, graph: Pag, sets: Sets, size: int) -> bool:
        """Test every adjacent pair given sets of `size` nodes; returns whether there were any."""
        cautious = self.cautious and size > 0
        tested, removed, of = False, [], sets(graph)
        for batch in self._batches(graph, size):
            todo = [(x, y, of(x, y)) for x, y in batch]
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

        With exact tests a node between x and y is in all of their separating sets or in none. Tests that err disagree:
        a common neighbour that some separating sets of a round contain, but not the best one, is left undecided. Any
        other is tested with and without: it is a collider if x and y are more independent without it. This costs one
        test per unshielded triple, and undoes edges x – y that were lost although the node does not explain it.
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


def _first_rank(test: Test, x: int, y: int, ranked: Candidates) -> tuple[int | None, int, int]:
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
