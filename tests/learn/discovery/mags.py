"""All maximal ancestral graphs of a few nodes at once, and what those with the same independences have in common.

No graph here is the library's: graphs are the columns of arrays, m-separation goes path by path, marks are compared.
"""

from itertools import combinations, pairwise, permutations

import numpy as np

from keyquery.learn.discovery.independence import IndependenceTest
from keyquery.learn.discovery.pag import members


class Mags:
    """Every maximal ancestral graph of `count` nodes: no edge, →, ←, ↔ or, with `selection`, – between each pair.

    `head[x, y]` says, graph by graph, whether the edge between x and y has an arrowhead at y; `edge[x, y]` whether
    there is one. With `tiers`, only graphs in which nothing of a later tier is an ancestor of something earlier.
    """

    def __init__(self, count, tiers=None, selection=False):
        self.count, self.pairs = count, list(combinations(range(count), 2))
        tiers = tiers or [0] * count
        kinds = np.indices([4 + selection] * len(self.pairs), dtype=np.int8).reshape(len(self.pairs), -1)
        for number, (x, y) in enumerate(self.pairs):  # 0 none, 1 x → y, 2 x ← y, 3 x ↔ y, 4 x – y
            forbidden = {1: tiers[x] > tiers[y], 2: tiers[y] > tiers[x]}
            kinds = kinds[:, ~np.isin(kinds[number], [kind for kind, bad in forbidden.items() if bad])]
        self._take(kinds)
        self._take(kinds[:, self._ancestral()])
        apart = self.separations()
        maximal = np.ones(self.kinds.shape[1], dtype=bool)
        for x, y in self.pairs:  # whatever is not adjacent is separated by some set
            maximal &= self.edge[x, y] | np.any([apart[x, y, z] for z in self.sets(x, y)], axis=0)
        self._take(self.kinds[:, maximal])

    def _take(self, kinds):
        self.kinds, self.edge, self.head = kinds, {}, {}
        for number, (x, y) in enumerate(self.pairs):
            self.edge[x, y] = self.edge[y, x] = kinds[number] != 0
            self.head[x, y], self.head[y, x] = np.isin(kinds[number], (1, 3)), np.isin(kinds[number], (2, 3))

    def _ancestors(self):
        """above[x, y]: whether x is y or an ancestor of y."""
        nodes = range(self.count)
        above = {(x, y): self.head[x, y] & ~self.head[y, x] for x in nodes for y in nodes if x != y}
        above |= {(x, x): np.ones(self.kinds.shape[1], dtype=bool) for x in nodes}
        for z in nodes:  # Warshall's closure
            above = {(x, y): above[x, y] | (above[x, z] & above[z, y]) for x in nodes for y in nodes}
        return above

    def _ancestral(self):
        """No arrowhead at an ancestor of the other end, nor at an end of an undirected edge."""
        above, nodes = self._ancestors(), range(self.count)
        wrong = np.zeros(self.kinds.shape[1], dtype=bool)
        for x in nodes:
            others = [y for y in nodes if y != x]
            plain = np.any([self.edge[x, y] & ~self.head[x, y] & ~self.head[y, x] for y in others], axis=0)
            wrong |= plain & np.any([self.head[y, x] for y in others], axis=0)
        return ~wrong & ~np.any([self.head[y, x] & above[x, y] for x, y in permutations(range(self.count), 2)], axis=0)

    def sets(self, x, y):
        others = [z for z in range(self.count) if z not in (x, y)]
        return [frozenset(some) for size in range(len(others) + 1) for some in combinations(others, size)]

    def separations(self):
        """By (x, y, set): in which graphs it m-separates them, which is if every path between them is blocked."""
        above, found = self._ancestors(), {}
        for x, y in self.pairs:
            others = [z for z in range(self.count) if z not in (x, y)]
            paths = [(x, *some, y) for size in range(len(others) + 1) for some in permutations(others, size)]
            for given in self.sets(x, y):
                opened = np.zeros(self.kinds.shape[1], dtype=bool)
                for path in paths:
                    carries = np.all([self.edge[a, b] for a, b in pairwise(path)], axis=0)
                    for a, b, c in zip(path, path[1:], path[2:], strict=False):
                        collider = self.head[a, b] & self.head[c, b]
                        known = np.any([above[b, z] for z in given], axis=0) if given else False
                        carries = carries & np.where(collider, known, b not in given)
                    opened |= carries
                found[x, y, given] = ~opened
        return found

    def classes(self):
        """For each independence model: its separations, and the marks that all of its graphs share, else circles."""
        apart = self.separations()
        models = np.packbits(np.array(list(apart.values())), axis=0)
        _, first, which = np.unique(models, axis=1, return_index=True, return_inverse=True)
        which, sizes, marks = which.reshape(-1), np.bincount(which.reshape(-1)), {}
        for x, y in permutations(range(self.count), 2):
            heads = np.bincount(which, self.head[y, x])  # how many graphs have one at x
            marks[x, y] = np.where(heads == sizes, "arrow", np.where(heads == 0, "tail", "circle")).tolist()
        for number, graph in enumerate(first):
            pairs = [(x, y) for x, y in self.pairs if self.edge[x, y][graph]]
            edges = [(x, y, marks[x, y][number], marks[y, x][number]) for x, y in pairs]
            yield {key for key, found in apart.items() if found[graph]}, edges


class Known(IndependenceTest):
    """The independences of a class as a test of the library."""

    def __init__(self, apart, count):
        super().__init__(count, 0.5)
        self.apart, self.asked = apart, set()

    def strength(self, query):
        given = frozenset(members(query.given))
        self.asked.add((query.x, query.y, given))
        return 0.0 if (min(query.x, query.y), max(query.x, query.y), given) in self.apart else 1.0
