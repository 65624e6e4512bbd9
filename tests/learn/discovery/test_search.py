"""Causal discovery against what can be known otherwise: d-separation, equivalent graphs, dense algebra."""

from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyquery.learn.discovery import (
    DSeparation,
    Pag,
    PartialCorrelation,
    Query,
    closed_sets,
    correlation_of,
    depths,
    fci,
    icd,
    icd_rounds,
    members,
    orient,
)
from tests.learn.discovery.sems import every_equivalent, mixed_of, random_sem, separated, true_mag, witnessed

GRAPHS = 60


@pytest.fixture(scope="module")
def sems():
    rng = np.random.default_rng(0)
    return [random_sem(rng) for _ in range(GRAPHS)]


@pytest.fixture(scope="module")
def true_pags(sems):
    """By d-separation."""
    return [icd(DSeparation(sem.graph, sem.observed)).graph for sem in sems]


def correlations(sem):
    return correlation_of(sem.attention[sem.observed])


def marks(graph):
    """Every end of every edge: at, other, mark."""
    return [end for i, j, at_i, at_j in graph.edges() for end in ((i, j, at_i), (j, i, at_j))]


def score(found, truth):
    """How many pairs are right, found and true."""
    return np.array([len({*found.pairs()} & {*truth.pairs()}), len(found.pairs()), len(truth.pairs())])


def test_the_true_graph_has_every_edge_and_every_mark_and_no_more(sems, true_pags):
    # Marks are those of the true ancestral graph, and each circle is an arrowhead in one equivalent graph, a tail in
    # another: what is told is sound, and what is not told cannot be known.
    told = 0
    for sem, pag in zip(sems, true_pags, strict=True):
        mag = true_mag(sem)
        assert {(i, j) for i, j in mag if i < j} == set(pag.pairs())
        circles = {(at, other) for at, other, mark in marks(pag) if mark == "circle"}
        for at, other, mark in marks(pag):
            assert mark == "circle" or (mark == "arrow") == mag[other, at]
        assert witnessed(mag, len(sem.observed), circles) == circles
        told += len(marks(pag)) - len(circles)
    assert told > 300


def test_denser_graphs_have_every_mark_too():
    # Among them some that need R10, which sparse ones hardly ever do.
    rng = np.random.default_rng(1)
    for index, sem in enumerate(random_sem(rng, 8, 3.0, 2) for _ in range(190)):
        if index in (100, 108, 189):
            pag = icd(DSeparation(sem.graph, sem.observed)).graph
            mag = true_mag(sem)
            circles = {(at, other) for at, other, mark in marks(pag) if mark == "circle"}
            assert all(mark == "circle" or (mark == "arrow") == mag[other, at] for at, other, mark in marks(pag))
            assert witnessed(mag, len(sem.observed), circles) == circles


def test_small_graphs_against_all_equivalent_ones():
    # Every mark of every equivalent graph, by brute force: those that all agree on, and no others.
    rng, edges = np.random.default_rng(5), 0
    for _ in range(30):
        sem = random_sem(rng, count=6, degree=2.0, hidden=1)
        mag, count = true_mag(sem), len(sem.observed)
        if not 2 <= len(mag) // 2 <= 6:
            continue
        graphs = list(every_equivalent(mag, count))
        for at, other, mark in marks(icd(DSeparation(sem.graph, sem.observed)).graph):
            heads = {graph[other, at] for graph in graphs}
            assert mark == {(True,): "arrow", (False,): "tail"}.get(tuple(heads), "circle")
            edges += 1
    assert edges > 80


def test_exact_graphs_at_many_samples(sems, true_pags):
    for sem, truth in zip(sems, true_pags, strict=True):
        assert icd(PartialCorrelation(correlations(sem), 1e10, 1e-3)).graph == truth


@pytest.mark.slow
def test_skeletons_at_768_samples(sems, true_pags):
    tests = (PartialCorrelation(correlations(sem), 768, 0.01) for sem in sems)
    found = (icd(test).graph for test in tests)
    right, told, true = sum(map(score, found, true_pags))
    assert right / true >= 0.80
    assert right / told >= 0.94


@pytest.mark.slow
def test_icd_equals_fci_and_asks_less(sems, true_pags):
    asked = np.zeros(2)
    for sem, truth in zip(sems, true_pags, strict=True):
        tests = [DSeparation(sem.graph, sem.observed) for _ in range(2)]
        assert icd(tests[0]).graph == truth
        assert fci(tests[1]).graph == truth
        asked += [test.tests for test in tests]
    assert asked[0] <= 0.7 * asked[1]


def test_no_mark_contradicts_ancestry(sems, true_pags):
    for sem, pag in zip(sems, true_pags, strict=True):
        before = {node: networkx.ancestors(sem.graph, node) for node in sem.graph}
        for at, other, mark in marks(pag):
            is_ancestor = sem.observed[at] in before[sem.observed[other]]
            assert mark == "circle" or is_ancestor == (mark == "tail")


def test_every_round_is_sound_and_the_last_is_the_graph(sems, true_pags):
    # A pair that is separated by a small set is apart early; arrowheads and tails are never taken back by the truth.
    for sem, truth in zip(sems[:20], true_pags, strict=False):
        rounds = list(icd_rounds(DSeparation(sem.graph, sem.observed)))
        assert [found.rounds for found in rounds] == list(range(1, len(rounds) + 1))
        assert [found.done for found in rounds] == [False] * (len(rounds) - 1) + [True]
        assert rounds[-1].graph == truth
        before = {node: networkx.ancestors(sem.graph, node) for node in sem.graph}
        for found in rounds:
            assert set(truth.pairs()) <= set(found.graph.pairs())
            for at, other, mark in marks(found.graph):
                if (min(at, other), max(at, other)) in truth.pairs():
                    is_ancestor = sem.observed[at] in before[sem.observed[other]]
                    assert mark == "circle" or is_ancestor == (mark == "tail")
        assert icd(DSeparation(sem.graph, sem.observed), rounds=2).graph == rounds[min(1, len(rounds) - 1)].graph


def test_separating_sets_separate(sems):
    for sem in sems[:20]:
        whole = mixed_of(sem.graph)
        found = icd(DSeparation(sem.graph, sem.observed))
        apart = set(combinations(range(len(sem.observed)), 2)) - set(found.graph.pairs())
        assert set(found.separations) == apart
        for (i, j), given_ in found.separations.items():
            assert separated(whole, sem.observed[i], sem.observed[j], {sem.observed[k] for k in members(given_)})


def turned(graph, order):
    """The graph with node k called order[k]."""
    edges = [(order[i], order[j], a, b) for i, j, a, b in graph.edges()]
    return Pag(len(graph), [(i, j, a, b) if i < j else (j, i, b, a) for i, j, a, b in edges])


@pytest.mark.parametrize("method", [icd, fci])
@pytest.mark.parametrize("samples", [64, 768])
@pytest.mark.few(1)
def test_the_order_of_nodes_does_not_matter(sems, samples, method):
    # Samples so few that tests are wrong and contradict each other.
    for seed, sem in enumerate(sems[:20]):
        correlation = correlations(sem)
        order = np.random.default_rng(seed).permutation(len(correlation))
        first = method(PartialCorrelation(correlation[np.ix_(order, order)], samples, 0.01)).graph
        assert turned(first, order.tolist()) == method(PartialCorrelation(correlation, samples, 0.01)).graph


@pytest.mark.slow
def test_the_order_of_nodes_does_not_matter_to_the_truth(sems, true_pags):
    for seed, (sem, truth) in enumerate(zip(sems[:20], true_pags, strict=False)):
        order = np.random.default_rng(seed).permutation(len(sem.observed)).tolist()
        observed = [sem.observed[k] for k in order]
        assert turned(icd(DSeparation(sem.graph, observed)).graph, order) == truth


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


def test_the_threshold_is_that_of_the_level():
    # Known quantiles of the normal distribution.
    for alpha, quantile in ((0.05, 1.959964), (0.01, 2.575829), (1e-20, 9.336)):
        assert np.isclose(PartialCorrelation(np.eye(3), 768, alpha).threshold, quantile, atol=1e-3)


def test_tests_are_counted_once_each_and_by_size():
    test = PartialCorrelation(correlation_of(np.tril(np.ones((4, 4)))), 768, 0.01)
    test.prepare([Query(0, 3, 0b0010), Query(0, 3, 0b0110)])
    assert test.tests == 0
    for query in (Query(0, 1, 0), Query(0, 3, 0b0010), Query(0, 3, 0b0010), Query(0, 3, 0b0110)):
        test.statistic(query)
    assert test.tests == 3
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


@given(seed=st.integers(0, 200))
def test_any_scaling_of_rows_cancels(seed):
    rng = np.random.default_rng(seed)
    attention = rng.dirichlet(np.ones(5), size=5)
    scale = 10.0 ** rng.uniform(-200, 200, (5, 1))
    assert np.allclose(correlation_of(attention * scale), correlation_of(attention), atol=1e-12)


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


def test_selection_makes_edges_undirected():
    # Four tests in a ring, selected by what each two neighbours bring about: no arrowhead can be.
    ring = networkx.DiGraph([(i, f"s{i}") for i in range(4)] + [((i + 1) % 4, f"s{i}") for i in range(4)])

    test = DSeparation(ring, range(4), ["s0", "s1", "s2", "s3"])
    found = icd(test, selection=True).graph
    assert found.edges() == [
        (0, 1, "tail", "tail"),
        (0, 3, "tail", "tail"),
        (1, 2, "tail", "tail"),
        (2, 3, "tail", "tail"),
    ]
    assert {mark for _, _, mark in marks(icd(test).graph)} == {"circle"}


def test_contradictions_leave_circles():
    # 0 → 2 o–o 1 ← 3 with no other edge: R1 wants 2 → 1 and 1 → 2.
    graph = Pag(6, [(i, j, "circle", "circle") for i, j in ((0, 2), (2, 4), (1, 2), (1, 3), (1, 5))])
    apart = {pair: 0b000110 for pair in combinations(range(6), 2) if pair not in graph.pairs()}
    apart |= {(0, 4): 0, (3, 5): 0}  # colliders at 2 and at 1
    found = orient(graph, apart)
    assert (found.mark(1, 2), found.mark(2, 1)) == ("circle", "circle")
    assert found.mark(2, 0) == found.mark(2, 4) == found.mark(1, 3) == found.mark(1, 5) == "arrow"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_nodes(count):
    found = icd(PartialCorrelation(np.eye(count), 768, 0.01))
    assert found.done
    assert found.graph == Pag(count)
    assert fci(PartialCorrelation(np.eye(count), 768, 0.01)).graph == Pag(count)
