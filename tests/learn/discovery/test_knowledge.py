"""Background knowledge and orders in time, against all maximal ancestral graphs that respect them."""

from itertools import islice, product

import numpy as np
import pytest

from keyquery.learn.discovery.independence import PartialCorrelation, correlation_of
from keyquery.learn.discovery.knowledge import knowledge_of
from keyquery.learn.discovery.pag import members
from keyquery.learn.discovery.search import METHODS, search
from tests.learn.discovery.mags import Known, Mags

# Every way to cut four nodes into tiers, from one tier to a total order.
TIERS = [[0, *np.cumsum(steps).tolist()] for steps in product([0, 1], repeat=3)]


class Respecting(Mags):
    """The graphs that respect forbidden and required pairs of ancestors."""

    def __init__(self, count, forbidden, required):
        super().__init__(count)
        above = self._ancestors()
        fits = np.ones(self.kinds.shape[1], dtype=bool)
        for x, y in forbidden:
            fits &= ~above[x, y]
        for x, y in required:
            fits &= self.edge[x, y] & self.head[x, y] & ~self.head[y, x]
        self._take(self.kinds[:, fits])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("forbidden", "required"), [([(0, 1), (2, 3)], []), ([], [(0, 1)]), ([(2, 1)], [(0, 1), (1, 3)])]
)
@pytest.mark.few(2)
def test_marks_hold_in_every_graph_that_respects_the_knowledge(forbidden, required, method):
    known, more = knowledge_of(4, forbidden=forbidden, required=required), 0
    for apart, edges in Respecting(4, forbidden, required).classes():
        shared = {(i, j): (at_i, at_j) for i, j, at_i, at_j in edges}
        pag = search(Known(apart, 4), method, knowledge=known).graph
        assert set(pag.pairs()) == set(shared)
        for i, j, *marks in pag.edges():
            for mark, true in zip(marks, shared[i, j], strict=True):
                assert mark in ("circle", true)
        plain = search(Known(apart, 4), method).graph
        more += sum(mark != "circle" for edge in pag.edges() for mark in edge[2:])
        more -= sum(mark != "circle" for edge in plain.edges() for mark in edge[2:])
    assert more > 0


@pytest.mark.parametrize(
    ("tiers", "every"),
    [
        *((tiers, 1) for tiers in TIERS),
        pytest.param([0, 1, 2, 3, 4], 20, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_marks_are_those_that_all_graphs_of_the_order_share(tiers, every):
    classes = 0
    for apart, edges in islice(Mags(len(tiers), tiers).classes(), 0, None, every):
        classes += 1
        for method in METHODS:
            test = Known(apart, len(tiers))
            assert search(test, method, knowledge=knowledge_of(len(tiers), tiers)).graph.edges() == edges
            late = [max(tiers[z] for z in given) > max(tiers[x], tiers[y]) for x, y, given in test.asked if given]
            assert not any(late)  # nothing that is later than both of a pair is conditioned on
    assert classes >= 155 // every


@pytest.mark.parametrize("method", METHODS)
def test_an_order_is_never_contradicted_whatever_the_tests_say(method):
    # Few samples, so that tests err: no tail at a later node, and every edge has an arrowhead there.
    rng, definite = np.random.default_rng(0), 0
    for _ in range(15):
        attention = np.tril(rng.dirichlet(np.full(9, 0.4), size=9) + 1e-3)
        test = PartialCorrelation(correlation_of(attention), 200, 0.01)
        for _, _, earlier, later in search(test, method, knowledge=knowledge_of(9, range(9))).graph.edges():
            assert later == "arrow"
            definite += earlier == "tail"
    assert definite > 6


def test_a_required_edge_stays_although_the_tests_separate_it():
    known = knowledge_of(3, required=[(2, 0)])
    assert search(
        Known({(0, 1, frozenset()), (0, 2, frozenset()), (1, 2, frozenset())}, 3), knowledge=known
    ).graph.edges() == [(0, 2, "arrow", "tail")]


def test_knowledge_is_closed_and_contradictions_are_named():
    known = knowledge_of(4, forbidden=[(3, 1), (0, 2)], required=[(0, 1)])
    # 3 is no ancestor of 1, hence not of 0; 0 is none of 2, hence 1 is none of 2; 1 is none of 0.
    assert [members(mask) for mask in known.barred] == [(1, 3), (3,), (0, 1), ()]
    with pytest.raises(ValueError, match="the required causes form a cycle"):
        knowledge_of(3, required=[(0, 1), (1, 2), (2, 0)])
    with pytest.raises(ValueError, match="'a' is required to be a cause of 'c', which other knowledge forbids"):
        knowledge_of(3, forbidden=[(0, 2)], required=[(0, 1), (1, 2)], names=["a", "b", "c"])
    with pytest.raises(ValueError, match="1 is required to be a cause of 0"):
        knowledge_of(2, tiers=[0, 1], required=[(1, 0)])
    with pytest.raises(ValueError, match="background knowledge and selection exclude each other"):
        search(Known(set(), 3), selection=True, knowledge=knowledge_of(3, required=[(0, 1)]))
