"""Random structural equation models, and what can be known of their graphs, by means that the library does not use.

A mixed graph is a dict: (i, j) to whether the edge between i and j has an arrowhead at j; both orders are keys.
"""

from collections import deque
from itertools import combinations
from typing import NamedTuple

import networkx
import numpy as np

from keyquery.learn.discovery.independence import IndependenceTest
from keyquery.learn.discovery.pag import members


class Sem(NamedTuple):
    attention: np.ndarray  # row-normalised (I − G)⁻¹
    graph: networkx.DiGraph
    observed: list[int]


def random_sem(rng, count=9, degree=2.2, hidden=2):
    """Lower-triangular weights from 0.4 to 0.9; hidden are parentless nodes with two children or more."""
    linked = np.tril(rng.random((count, count)) < degree / (count - 1), -1)
    solved = np.linalg.inv(np.eye(count) - linked * rng.uniform(0.4, 0.9, (count, count)))
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from((int(parent), int(child)) for child, parent in np.argwhere(linked))
    able = [node for node in graph if graph.in_degree(node) == 0 and graph.out_degree(node) >= 2]
    gone = set(rng.permutation(able)[:hidden].tolist())
    return Sem(solved / solved.sum(1, keepdims=True), graph, [node for node in range(count) if node not in gone])


class DSeparation(IndependenceTest):
    """d-separation in a DiGraph of which some nodes are observed, in this order, and some selected on."""

    def __init__(self, graph, observed, selected=()):
        super().__init__(len(observed), 0.5)
        self.graph, self.observed, self.selected = graph, list(observed), set(selected)

    def strength(self, query):
        given = {self.observed[node] for node in members(query.given)} | self.selected
        ends = {self.observed[query.x]}, {self.observed[query.y]}
        return 0.0 if networkx.is_d_separator(self.graph, *ends, given) else 1.0


def ancestors(mixed, of):
    """The nodes with a directed path into a set, those of the set among them."""
    found, new = set(of), set(of)
    while new:
        new = {i for (i, j), head in mixed.items() if j in new and head and not mixed[j, i]} - found
        found |= new
    return found


def separated(mixed, x, y, given):
    """m-separation, by walks: colliders must have a descendant in the set, others must not be in it."""
    opened, given = ancestors(mixed, given), set(given)
    neighbours = {}
    for i, j in mixed:
        neighbours.setdefault(i, []).append(j)
    todo = deque((j, mixed[x, j]) for j in neighbours.get(x, []))
    seen = set(todo)
    while todo:
        node, into = todo.popleft()
        if node == y:
            return False
        for following in neighbours[node]:
            collider = into and mixed[following, node]
            if (node in opened) if collider else (node not in given):
                state = (following, mixed[node, following])
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
    return True


def mixed_of(graph):
    """A directed graph as a mixed one."""
    return {pair: head for i, j in graph.edges for pair, head in (((i, j), True), ((j, i), False))}


def true_mag(graph, observed, selected=()):
    """The maximal ancestral graph over what is observed, its nodes numbered in order.

    Two nodes are adjacent unless what is observed of their ancestors, and of those of selected nodes, separates them;
    an end is a tail where it is an ancestor of the other or of a selected node.
    """
    whole, mag = mixed_of(graph), {}
    for (i, x), (j, y) in combinations(enumerate(observed), 2):
        given = (ancestors(whole, [x, y, *selected]) & set(observed)) - {x, y}
        if not separated(whole, x, y, given | set(selected)):
            mag[i, j] = y not in ancestors(whole, [x, *selected])
            mag[j, i] = x not in ancestors(whole, [y, *selected])
    return mag


def pairwise(mixed, count):
    """For each pair that is not adjacent, a set that separates it: its ancestors."""
    pairs = (pair for pair in combinations(range(count), 2) if pair not in mixed)
    return [(x, y, ancestors(mixed, [x, y]) - {x, y}) for x, y in pairs]


def is_ancestral(mixed):
    """No node is an ancestor of one whose edge with it has an arrowhead at it."""
    return all(not (head and j in ancestors(mixed, [i])) for (i, j), head in mixed.items())


def equivalent(one, other, count):
    """Whether two mixed graphs over the same adjacent pairs have the same separations."""
    return all(
        separated(second, *found) for first, second in ((one, other), (other, one)) for found in pairwise(first, count)
    )


def witnessed(mag, count, ends):
    """Of the ends (at, other), those that have both marks among graphs that are equivalent to this one.

    Begins with graphs whose edges of two such ends all lead away from some node, and walks on by changes of single
    marks, to ends that are not found yet first, until all are.
    """
    seen, flipped, todo, known = set(), set(), [], pairwise(mag, count)

    def visit(graph):
        key = tuple(sorted(graph.items()))
        if key in seen or not is_ancestral(graph):
            return
        seen.add(key)
        if all(separated(graph, *one) for one in known) and equivalent(mag, graph, count):
            flipped.update((b, a) for (a, b), head in graph.items() if head != mag[a, b])
            todo.append(graph)

    for first in [None, *range(count)]:
        visit(mag if first is None else led_away(mag, count, ends, first))
    while todo and not ends <= flipped:
        found = todo.pop()
        for i, j in sorted(found, key=lambda pair: (pair[1], pair[0]) in ends - flipped):
            changed = {**found, (i, j): not found[i, j]}
            if (changed[i, j] or changed[j, i]) and not moves_collider(changed, i, j, count):
                visit(changed)
    return flipped & ends


def led_away(mag, count, ends, first):
    """Edges both of whose ends are open, directed in an order that begins with one node and stays among neighbours."""
    open_ = {(i, j) for i, j in mag if (i, j) in ends and (j, i) in ends}
    order = []
    while len(order) < count:
        left = [node for node in range(count) if node not in order]
        order.append(max(left, key=lambda node: (sum((node, old) in open_ for old in order), node == first)))
    return {(i, j): order.index(i) < order.index(j) if (i, j) in open_ else head for (i, j), head in mag.items()}


def moves_collider(mixed, i, j, count):
    """Whether the mark at j of the edge from i decides on a collider i – j – k whose ends are apart."""
    others = (k for k in range(count) if k not in (i, j) and (k, j) in mixed and (i, k) not in mixed)
    return any(mixed[k, j] for k in others)
