"""Causal discovery that knows an order, against all maximal ancestral graphs of up to five nodes that respect it."""

from itertools import islice, product

import numpy as np
import pytest

from keyquery.learn.discovery import DSeparation, PartialCorrelation, correlation_of, fci, icd, members
from tests.learn.discovery.mags import Known, Mags
from tests.learn.discovery.sems import random_sem, true_mag

# Every way to cut four nodes into tiers, from one tier to a total order.
TIERS = [[0, *np.cumsum(steps).tolist()] for steps in product([0, 1], repeat=3)]


def compared(count, tiers, every=1):
    """How many classes of graphs, and how many of them have another graph than the marks that all members share.

    Nothing that is later than both of a pair is conditioned on.
    """
    classes, wrong = 0, {icd: 0, fci: 0}
    for apart, edges in islice(Mags(count, tiers).classes(), 0, None, every):
        classes += 1
        for method in wrong:
            test = Known(apart, count)
            wrong[method] += method(test, tiers=tiers).graph.edges() != edges
            late = [max(tiers[z] for z in given) > max(tiers[x], tiers[y]) for x, y, given in test.asked if given]
            assert not any(late)
    return classes, wrong


def test_brute_force_knows_the_number_of_graphs():
    # By hand: two nodes have no edge, →, ← or ↔; an order forbids one of them.
    assert (Mags(2).kinds.shape[1], Mags(2, [0, 1]).kinds.shape[1]) == (4, 3)
    assert sum(1 for _ in Mags(3).classes()) == 11  # as many as there are patterns of three nodes


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_marks_are_those_that_all_graphs_of_the_order_share(tiers):
    classes, wrong = compared(4, tiers)
    assert classes >= 155
    assert set(wrong.values()) == {0}


@pytest.mark.slow
def test_marks_of_five_ordered_nodes_too():
    assert compared(5, [0, 1, 2, 3, 4], every=20) == (394, {icd: 0, fci: 0})


@pytest.mark.parametrize("method", [icd, fci])
@pytest.mark.slow
def test_an_order_is_never_contradicted_whatever_the_tests_say(method):
    # Few samples, so that tests err: no tail at a later node, and every edge has an arrowhead there.
    rng, definite = np.random.default_rng(0), 0
    for _ in range(15):
        attention = np.tril(rng.dirichlet(np.full(9, 0.4), size=9) + 1e-3)
        test = PartialCorrelation(correlation_of(attention), 200, 0.01)
        for _, _, earlier, later in method(test, tiers=range(9)).graph.edges():
            assert later == "arrow"
            definite += earlier == "tail"
    assert definite > 6


def test_an_order_tells_more_and_nothing_else():
    # Of known models with hidden causes: the same edges, all marks true, more of them than without the order.
    rng, told = np.random.default_rng(2), np.zeros(2, dtype=int)
    for _ in range(12):
        sem = random_sem(rng)
        plain, ordered = (
            icd(DSeparation(sem.graph, sem.observed), tiers=tiers).graph for tiers in (None, range(len(sem.observed)))
        )
        mag = true_mag(sem)
        assert ordered.pairs() == plain.pairs()
        for x in range(len(ordered)):
            for y in members(ordered.adjacent[x]):
                assert ordered.mark(x, y) in ("circle", "arrow" if mag[y, x] else "tail")
                assert plain.mark(x, y) in ("circle", ordered.mark(x, y))
                told += [plain.mark(x, y) != "circle", ordered.mark(x, y) != "circle"]
    assert told[1] > 1.2 * told[0]


def test_tiers_are_checked():
    test = PartialCorrelation(np.eye(3), 768, 0.01)
    with pytest.raises(ValueError, match="tiers must have one number per node, 3, got 2"):
        icd(test, tiers=[0, 1])
    with pytest.raises(ValueError, match="tiers and selection exclude each other"):
        fci(test, selection=True, tiers=[0, 1, 2])
