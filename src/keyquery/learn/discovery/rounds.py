"""Rounds of a search: adjacent pairs are tested given candidate sets, and separated ones lose their edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keyquery.learn.discovery.colliders import Decided, decided
from keyquery.learn.discovery.independence import Query, Test
from keyquery.learn.discovery.knowledge import Knowledge
from keyquery.learn.discovery.pag import Pag, members
from keyquery.support.progress import Progress

# Candidate separating sets of a pair, each with its cost: cheaper ones are tried first.
Candidates = list[tuple[int, int]]
Sets = Callable[[Pag], Callable[[int, int], Candidates]]
Ranked = list[tuple[tuple[int, float], int]]  # the same, by cost and weakness
BATCH = 64  # pairs tested at once


class Rounds:
    """The rounds of a search and the separating sets that they found.

    With `order_free`, edges are deleted at the end of a round. Of the cheapest separating sets the one with the least
    remaining dependence is kept. A cautious round tries sets of nodes that depend on both x and y most first, stops at
    the first that separates them, and of the others of this cost tests those with a common neighbour of x and y: only
    these can be colliders.
    """

    def __init__(self, test: Test, known: Knowledge, order_free: bool, cautious: bool, progress: Progress) -> None:
        self.test, self.known, self.order_free, self.cautious = test, known, order_free, cautious
        self.progress = progress
        self.separations: dict[tuple[int, int], int] = {}  # by pair, the mask of a separating set
        self.unions: dict[tuple[int, int], int] = {}  # of all separating sets of its round
        self.strengths: list[list[float]] = []  # of dependence, given nothing

    def __call__(self, graph: Pag, sets: Sets, size: int) -> bool:
        """Test every adjacent pair given sets of `size` nodes; returns whether there were any."""
        if self.cautious and self.order_free and size:
            return self._cautious(graph, sets, size)
        tested, removed, of = False, [], sets(graph)
        for batch in self._batches(graph, size):
            todo = self._prepared(batch, of)
            for x, y, candidates in todo:
                tested = tested or bool(candidates)
                choose = _best if self.order_free else _first
                separating, union = choose(self.test, x, y, candidates)
                if separating is None:
                    continue
                self.separations[x, y], self.unions[x, y] = separating, union
                if self.order_free:
                    removed.append((x, y))
                else:
                    graph.remove(x, y)
                    of = sets(graph)
        for x, y in removed:
            graph.remove(x, y)
        return tested

    def colliders(self, graph: Pag, last: bool = False) -> Mapping[tuple[int, int], int]:
        """By pair, the mask of nodes that are no colliders between them; `last` after all rounds."""
        if not self.cautious:
            return self.separations
        return decided(graph, self.test, self.separations, self.unions, self.known) if last else Decided(self.unions)

    def _batches(self, graph: Pag, size: int) -> Iterable[list[tuple[int, int]]]:
        pairs = [pair for pair in graph.pairs() if not self.known.keeps(*pair)]
        step = BATCH if self.order_free else 1
        batches = [pairs[start : start + step] for start in range(0, len(pairs), step)]
        return self.progress(batches, f"sets of {size} token{'' if size == 1 else 's'}", len(batches))

    def _prepared(self, batch: list[tuple[int, int]], of: Any) -> list[tuple[int, int, Candidates]]:
        todo = [(x, y, of(x, y)) for x, y in batch]
        self.test.prepare(Query(x, y, separating) for x, y, candidates in todo for _, separating in candidates)
        return todo

    def _cautious(self, graph: Pag, sets: Sets, size: int) -> bool:
        tested, removed, of = False, [], sets(graph)
        strengths = self.strengths = self.strengths or self._strengths()
        for batch in self._batches(graph, size):
            for x, y, candidates in self._prepared(batch, of):
                tested = tested or bool(candidates)
                ranked = _ranked(candidates, strengths[x], strengths[y])
                separating, union, place = _strongest(self.test, x, y, ranked)
                if separating is not None:
                    price = ranked[place - 1][0][0]
                    others = [z for (cost, _), z in ranked[place:] if cost == price]
                    removed.append((x, y, separating, union, others))
        for x, y, *_ in removed:
            graph.remove(x, y)
        for x, y, separating, union, others in removed:
            common = graph.adjacent[x] & graph.adjacent[y]
            further = [(0, separating), *((0, z) for z in others if z & common)]
            best, found = _best(self.test, x, y, further)
            self.separations[x, y], self.unions[x, y] = separating if best is None else best, union | found
        return tested

    def _strengths(self) -> list[list[float]]:
        """How strongly each pair depends, given nothing; required edges, which are not tested, most."""
        table = [[math.inf] * self.test.count for _ in range(self.test.count)]
        for x in range(self.test.count):
            for y in range(x + 1, self.test.count):
                if not self.known.keeps(x, y):
                    table[x][y] = table[y][x] = self.test.statistic(Query(x, y, 0))
        return table


def _first(test: Test, x: int, y: int, candidates: Candidates) -> tuple[int | None, int]:
    """The first separating set, cheapest first, twice."""
    first = next((z for _, z in candidates if test.statistic(Query(x, y, z)) < test.threshold), None)
    return first, first or 0


def _best(test: Test, x: int, y: int, candidates: Candidates) -> tuple[int | None, int]:
    """Of the cheapest separating sets, the one with the least remaining dependence, and the union of all of them."""
    best, separating, price, union = test.threshold, None, None, 0
    for cost, z in candidates:
        if separating is not None and cost != price:
            break
        statistic = test.statistic(Query(x, y, z))
        if statistic < test.threshold:
            union |= z
        if statistic < best:
            best, separating, price = statistic, z, cost
    return separating, union


def _ranked(candidates: Candidates, of_x: list[float], of_y: list[float]) -> Ranked:
    """Candidates by cost, and then by how strongly their nodes depend on both x and y."""
    least = list(map(min, of_x, of_y))
    return sorted(((cost, -math.fsum([least[node] for node in members(z)])), z) for cost, z in candidates)


def _strongest(test: Test, x: int, y: int, ranked: Ranked) -> tuple[int | None, int, int]:
    """The best of the first separating sets that rank equally, the union of these, and the place after them."""
    best, separating, rank, union = test.threshold, None, None, 0
    for place, (own, z) in enumerate(ranked):
        if separating is not None and own != rank:
            return separating, union, place
        statistic = test.statistic(Query(x, y, z))
        if statistic < test.threshold:
            union |= z
        if statistic < best:
            best, separating, rank = statistic, z, own
    return separating, union, len(ranked)
