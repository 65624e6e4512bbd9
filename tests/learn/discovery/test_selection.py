"""Discovery with selection bias, against all maximal ancestral graphs of four nodes and random graphs."""

from itertools import combinations, islice

import networkx
import numpy as np
import pytest

from keyquery.learn.discovery import DSeparation, fci, icd
from tests.learn.discovery.mags import Known, Mags
from tests.learn.discovery.sems import ancestors, mixed_of, random_sem, separated


def compared(count, every=1):
    """How many classes of graphs, and for how many each method gives other marks than all members share."""
    classes, wrong = 0, {icd: 0, fci: 0}
    for apart, edges in islice(Mags(count, selection=True).classes(), 0, None, every):
        classes += 1
        for method in wrong:
            wrong[method] += method(Known(apart, count), selection=True).graph.edges() != edges
    return classes, wrong


def test_brute_force_knows_the_number_of_graphs():
    assert Mags(2, selection=True).kinds.shape[1] == 5
    # Three nodes in a row by hand: – – , and – with → leaving it; an arrowhead never meets an undirected edge.
    assert not any(
        (row[0] == 4 and row[2] in (2, 3)) for row in Mags(3, selection=True).kinds[[0, 1, 2]].T.tolist() if row[1] == 0
    )


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_marks_are_those_that_all_graphs_with_selection_share(every):
    classes, wrong = compared(4, every)
    assert classes > 155 / every
    assert set(wrong.values()) == {0}


def selected_sem(rng):
    """A random graph with hidden causes, and selection by common effects of observed nodes."""
    sem = random_sem(rng, count=8, hidden=2)
    graph = sem.graph.copy()
    for number in range(int(rng.integers(1, 3))):
        graph.add_edges_from((int(node), f"selected {number}") for node in rng.choice(sem.observed, 2, replace=False))
    return graph, sem.observed, [node for node in graph if isinstance(node, str)]


def selected_mag(graph, observed, selected):
    """Adjacent unless observed nodes separate them under selection; a tail at ancestors of the other end or of it."""
    whole, mag = mixed_of(graph), {}
    for (i, x), (j, y) in combinations(enumerate(observed), 2):
        given = (ancestors(whole, [x, y, *selected]) & set(observed)) - {x, y}
        if not separated(whole, x, y, given | set(selected)):
            mag[i, j] = y not in ancestors(whole, [x, *selected])
            mag[j, i] = x not in ancestors(whole, [y, *selected])
    return mag


@pytest.mark.parametrize("method", [icd, fci])
@pytest.mark.slow
def test_random_graphs_with_hidden_causes_and_selection(method):
    rng, told = np.random.default_rng(0), 0
    for _ in range(12):
        graph, observed, selected = selected_sem(rng)
        mag = selected_mag(graph, observed, selected)
        pag = method(DSeparation(graph, observed, selected), selection=True).graph
        assert set(pag.pairs()) == {(i, j) for i, j in mag if i < j}
        for i, j, at_i, at_j in pag.edges():
            assert at_i in ("circle", "arrow" if mag[j, i] else "tail")
            assert at_j in ("circle", "arrow" if mag[i, j] else "tail")
            told += (at_i != "circle") + (at_j != "circle")
    assert told > 20


def test_selection_variables_are_conditioned_on():
    graph = networkx.DiGraph([("a", "s"), ("b", "s")])
    assert icd(DSeparation(graph, ["a", "b"])).graph.pairs() == []
    assert icd(DSeparation(graph, ["a", "b"], ["s"]), selection=True).graph.pairs() == [(0, 1)]
