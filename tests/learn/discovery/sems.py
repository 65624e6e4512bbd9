"""Random structural equation models, and what can be known of their graphs, by means that the library does not use."""

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


def true_mag(graph, observed, selected=()):
    """The maximal ancestral graph over what is observed, by pair (i, j) of its numbers: has the edge a head at j?

    Two nodes are adjacent unless what is observed of their ancestors, and of those of selected nodes, separates them;
    an end is a tail where it is an ancestor of the other or of a selected node.
    """
    above, mag = {node: networkx.ancestors(graph, node) | {node} for node in graph}, {}
    for (i, x), (j, y) in combinations(enumerate(observed), 2):
        of_x, of_y = (above[node].union(*(above[other] for other in selected)) for node in (x, y))
        given = ((of_x | of_y) & set(observed)) - {x, y}
        if not networkx.is_d_separator(graph, {x}, {y}, given.union(selected)):
            mag[i, j], mag[j, i] = y not in of_x, x not in of_y
    return mag
