"""Causal discovery against what can be known otherwise: d-separation, equivalent graphs, dense algebra."""

from itertools import combinations, islice, product

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyquery.learn.discovery.independence import PartialCorrelation, Query, correlation_of
from keyquery.learn.discovery.knowledge import knowledge_of
from keyquery.learn.discovery.pag import Pag, closed_sets, depths, members
from keyquery.learn.discovery.rules import Separations, orient
from keyquery.learn.discovery.search import METHODS, search
from tests.learn.discovery.mags import Known, Mags
from tests.learn.discovery.sems import DSeparation, random_sem, true_mag

GRAPHS = 30


@pytest.fixture(scope="module")
def sems():
    """Sparse ones, and denser ones that need R10, which sparse ones hardly ever do."""
    sparse, dense = np.random.default_rng(0), np.random.default_rng(1)
    denser = [random_sem(dense, 8, 3.0, 2) for _ in range(190)]
    return [*(random_sem(sparse) for _ in range(GRAPHS)), *(denser[index] for index in (100, 108, 189))]


@pytest.fixture(scope="module")
def true_pags(sems):
    """By d-separation."""
    return [search(DSeparation(sem.graph, sem.observed)).graph for sem in sems]


def correlations(sem):
    return correlation_of(sem.attention[sem.observed])


def marks(graph):
    """Every end of every edge: at, other, mark."""
    return [end for i, j, at_i, at_j in graph.edges() for end in ((i, j, at_i), (j, i, at_j))]


def assert_sound(graph, mag):
    """Marks that are not circles are those of the true ancestral graph."""
    for at, other, mark in marks(graph):
        assert (other, at) not in mag or mark in ("circle", "arrow" if mag[other, at] else "tail")


def test_the_true_graph_has_every_edge_and_no_wrong_mark(sems, true_pags):
    told = 0
    for sem, pag in zip(sems, true_pags, strict=True):
        mag = true_mag(sem.graph, sem.observed)
        assert {(i, j) for i, j in mag if i < j} == set(pag.pairs())
        assert_sound(pag, mag)
        told += sum(mark != "circle" for *_, mark in marks(pag))
        assert search(DSeparation(sem.graph, sem.observed), "fci").graph == pag
        assert search(PartialCorrelation(correlations(sem), 1e10, 1e-3)).graph == pag
    assert told > 150


@pytest.mark.parametrize(
    ("count", "selection", "every"),
    [
        (4, False, 1),
        (4, True, 1),
        pytest.param(5, False, 20, marks=pytest.mark.slow),
    ],
)
def test_marks_are_those_that_all_graphs_share(count, selection, every):
    classes = 0
    for apart, edges in islice(Mags(count, selection=selection).classes(), 0, None, every):
        classes += 1
        for method, cautious in product(METHODS, (False, True)):
            test = Known(apart, count)
            assert search(test, method, selection=selection, cautious=cautious).graph.edges() == edges
    assert classes >= {4: 155, 5: 7000}[count] // every


def test_brute_force_knows_the_number_of_graphs():
    # By hand: two nodes have no edge, →, ← or ↔; an order forbids one of them, selection adds –.
    sizes = [mags.kinds.shape[1] for mags in (Mags(2), Mags(2, [0, 1]), Mags(2, selection=True))]
    assert sizes == [4, 3, 5]
    assert sum(1 for _ in Mags(3).classes()) == 11  # as many as there are patterns of three nodes


@pytest.mark.parametrize("method", METHODS)
def test_random_graphs_with_hidden_causes_and_selection(method):
    rng, told = np.random.default_rng(0), 0
    for _ in range(6):
        sem = random_sem(rng, count=8, hidden=2)
        graph, selected = sem.graph.copy(), ["selected 0", "selected 1"][: int(rng.integers(1, 3))]
        for node in selected:
            graph.add_edges_from((int(cause), node) for cause in rng.choice(sem.observed, 2, replace=False))
        mag = true_mag(graph, sem.observed, selected)
        pag = search(DSeparation(graph, sem.observed, selected), method, selection=True).graph
        assert set(pag.pairs()) == {(i, j) for i, j in mag if i < j}
        assert_sound(pag, mag)
        told += sum(mark != "circle" for *_, mark in marks(pag))
    assert told > 10


def test_every_round_is_sound_and_the_last_is_the_graph(sems, true_pags):
    for sem, truth in zip(sems[:10], true_pags, strict=False):
        mag, rounds, done = true_mag(sem.graph, sem.observed), 0, False
        while not done:
            rounds += 1
            found = search(DSeparation(sem.graph, sem.observed), rounds=rounds)
            done = found.effort["done"]
            assert found.effort["rounds"] == rounds
            assert set(truth.pairs()) <= set(found.graph.pairs())
            assert_sound(found.graph, mag)
        assert found.graph == truth


def turned(graph, order):
    """The graph with node k called order[k]."""
    edges = [(order[i], order[j], a, b) for i, j, a, b in graph.edges()]
    return Pag(len(graph), [(i, j, a, b) if i < j else (j, i, b, a) for i, j, a, b in edges])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("samples", [64, 768])
@pytest.mark.few(1)
def test_the_order_of_nodes_does_not_matter(sems, samples, method):
    # Samples so few that tests are wrong and contradict each other.
    for seed, sem in enumerate(sems[:20]):
        correlation, options = correlations(sem), {"method": method, "cautious": seed % 2 == 0}
        order = np.random.default_rng(seed).permutation(len(correlation))
        first = search(PartialCorrelation(correlation[np.ix_(order, order)], samples, 0.01), **options).graph
        assert turned(first, order.tolist()) == search(PartialCorrelation(correlation, samples, 0.01), **options).graph


def by_inverse(correlation, x, y, given_):
    """The textbook's partial correlation, from the inverse of the submatrix."""
    nodes = [x, y, *given_]
    inverse = np.linalg.inv(correlation[np.ix_(nodes, nodes)])
    return -inverse[0, 1] / np.sqrt(inverse[0, 0] * inverse[1, 1])


@given(seed=st.integers(0, 1000), size=st.integers(0, 4))
def test_partial_correlations_against_the_inverse(seed, size):
    rng = np.random.default_rng(seed)
    correlation = correlation_of(rng.dirichlet(np.ones(7), size=7))
    test = PartialCorrelation(correlation, 768, 0.01)
    sets = [rng.permutation(7)[: size + 2].tolist() for _ in range(5)]
    found = test.partial([(x, y) for x, y, *_ in sets], [rest for _, _, *rest in sets])
    assert np.allclose(found, [by_inverse(correlation, x, y, rest) for x, y, *rest in sets], atol=1e-8)
    query = Query(sets[0][0], sets[0][1], sum(1 << node for node in sets[0][2:]))
    rho = by_inverse(correlation, query.x, query.y, sets[0][2:])
    assert np.isclose(test.statistic(query), np.sqrt(768 - size - 3) * abs(np.arctanh(rho)))


def test_tests_are_counted_once_each_and_by_size():
    test = PartialCorrelation(correlation_of(np.tril(np.ones((4, 4)))), 768, 0.01)
    test.prepare([Query(0, 3, 0b0010), Query(0, 3, 0b0110)])
    assert not test.by_size
    for query in (Query(0, 1, 0), Query(0, 3, 0b0010), Query(0, 3, 0b0010), Query(0, 3, 0b0110)):
        test.statistic(query)
    assert dict(test.by_size) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_set_that_tells_a_node_says_nothing_about_it(size):
    # Row 0 is row 1; given 1, nothing is left of 0 that could or could not depend on 5.
    rng = np.random.default_rng(0)
    attention = rng.dirichlet(np.ones(6), size=6)
    attention[0] = attention[1]
    test = PartialCorrelation(correlation_of(attention), 768, 0.01)
    known = sum(1 << node for node in range(1, size + 1))
    assert test.statistic(Query(0, 5, known)) == np.inf
    assert test.statistic(Query(5, 0, known)) == np.inf
    assert test.statistic(Query(0, 1, known & ~0b10)) > 100  # the same row twice: dependent, whatever is known
    # Both copies in the set say what one of them says.
    both, one = test.statistic(Query(4, 5, 0b000011)), test.statistic(Query(4, 5, 0b000010))
    assert np.isclose(both * np.sqrt(764), one * np.sqrt(763), rtol=1e-6)


def paths(graph, root, inside):
    """How far the nodes are that PDS-paths from the root within a set lead to, by a graph of their steps."""
    around = [root, *inside]
    steps = networkx.DiGraph()
    steps.add_nodes_from([(a, b) for a in around for b in inside if graph.adjacent[a] >> b & 1])
    steps.add_edges_from(
        ((a, b), (b, c))
        for a, b in list(steps)
        for c in inside
        if c != a
        and (b, c) in steps
        and (graph.adjacent[a] >> c & 1 or graph.mark(b, a) == graph.mark(b, c) == "arrow")
    )
    found = {}
    for start in [step for step in steps if step[0] == root]:
        for (_, end), far in networkx.single_source_shortest_path_length(steps, start).items():
            found[end] = min(found.get(end, 99), far + 1)
    return found


@given(seed=st.integers(0, 300))
def test_closed_sets_against_all_paths(seed):
    rng = np.random.default_rng(seed)
    edges = [
        (i, j, *rng.choice(["arrow", "circle"], 2).tolist()) for i, j in combinations(range(5), 2) if rng.random() < 0.6
    ]
    graph = Pag(5, edges)
    pool = [1, 2, 3, 4]
    expected = {
        frozenset(some)
        for size in range(1, 5)
        for some in combinations(pool, size)
        if set(paths(graph, 0, list(some))) == set(some)
    }
    found = [members(one) for sets in closed_sets(graph, 0, 0b11110, 4) for one in sets]
    assert {frozenset(one) for one in found} == expected
    assert len(found) == len(expected)
    assert depths(graph, 0) == paths(graph, 0, pool)


def test_contradictions_leave_circles():
    # 0 → 2 o–o 1 ← 3 with no other edge: R1 wants 2 → 1 and 1 → 2.
    graph = Pag(6, [(i, j, "circle", "circle") for i, j in ((0, 2), (2, 4), (1, 2), (1, 3), (1, 5))])
    apart = {pair: 0b000110 for pair in combinations(range(6), 2) if pair not in graph.pairs()}
    apart |= {(0, 4): 0, (3, 5): 0}  # colliders at 2 and at 1
    orient(graph, Separations(apart), False, knowledge_of(6))
    assert (graph.mark(1, 2), graph.mark(2, 1)) == ("circle", "circle")
    assert graph.mark(2, 0) == graph.mark(2, 4) == graph.mark(1, 3) == graph.mark(1, 5) == "arrow"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_nodes(count):
    found = search(PartialCorrelation(np.eye(count), 768, 0.01))
    assert found.effort["done"]
    assert found.graph == Pag(count)
    assert search(PartialCorrelation(np.eye(count), 768, 0.01), "fci").graph == Pag(count)
