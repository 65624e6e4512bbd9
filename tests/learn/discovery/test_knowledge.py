"""Background knowledge: pairs that are forbidden or required, against all graphs that respect them."""

from itertools import islice

import numpy as np
import pytest

from keyquery.learn.discovery import DSeparation, fci, icd, knowledge_of, members
from tests.learn.discovery.mags import Known, Mags
from tests.learn.discovery.sems import ancestors, mixed_of, random_sem, true_mag


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


@pytest.mark.parametrize("method", [icd, fci])
@pytest.mark.parametrize(
    ("forbidden", "required"), [([(0, 1), (2, 3)], []), ([], [(0, 1)]), ([(2, 1)], [(0, 1), (1, 3)])]
)
@pytest.mark.few(2)
def test_marks_hold_in_every_graph_that_respects_the_knowledge(forbidden, required, method):
    known, more = knowledge_of(4, forbidden=forbidden, required=required), 0
    for apart, edges in islice(Respecting(4, forbidden, required).classes(), 0, None, 6):
        shared = {(i, j): (at_i, at_j) for i, j, at_i, at_j in edges}
        pag = method(Known(apart, 4), knowledge=known).graph
        assert set(pag.pairs()) == set(shared)
        for i, j, *marks in pag.edges():
            for mark, true in zip(marks, shared[i, j], strict=True):
                assert mark in ("circle", true)
        plain = method(Known(apart, 4)).graph
        more += sum(mark != "circle" for edge in pag.edges() for mark in edge[2:])
        more -= sum(mark != "circle" for edge in plain.edges() for mark in edge[2:])
    assert more > 0


def test_true_knowledge_of_random_graphs_tells_more_and_nothing_wrong():
    rng, told = np.random.default_rng(1), np.zeros(2, dtype=int)
    for _ in range(6):
        sem = random_sem(rng)
        whole, count = mixed_of(sem.graph), len(sem.observed)
        mag = true_mag(sem)
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        wrong = [(i, j) for i, j in pairs if sem.observed[i] not in ancestors(whole, [sem.observed[j]])]
        right = [(i, j) for i, j in mag if mag[i, j] and not mag[j, i]]
        forbidden = [wrong[k] for k in rng.choice(len(wrong), 6, replace=False)]
        known = knowledge_of(count, forbidden=forbidden, required=right[:1])
        plain, pag = (icd(DSeparation(sem.graph, sem.observed), knowledge=each).graph for each in (None, known))
        assert pag.pairs() == plain.pairs()
        for x in range(count):
            for y in members(pag.adjacent[x]):
                assert pag.mark(x, y) in ("circle", "arrow" if mag[y, x] else "tail")
                told += [plain.mark(x, y) != "circle", pag.mark(x, y) != "circle"]
    assert told[1] > told[0]


def test_a_required_edge_stays_although_the_tests_separate_it():
    known = knowledge_of(3, required=[(2, 0)])
    assert icd(
        Known({(0, 1, frozenset()), (0, 2, frozenset()), (1, 2, frozenset())}, 3), knowledge=known
    ).graph.edges() == [(0, 2, "arrow", "tail")]


def test_knowledge_is_closed_and_contradictions_are_named():
    known = knowledge_of(4, forbidden=[(3, 1), (0, 2)], required=[(0, 1)])
    # 3 is no ancestor of 1, hence not of 0; 0 is none of 2, hence 1 is none of 2; 1 is none of 0.
    assert [members(mask) for mask in known.barred] == [(1, 3), (3,), (0, 1), ()]
    with pytest.raises(ValueError, match="the required causes form a cycle"):
        knowledge_of(3, required=[(0, 1), (1, 2), (2, 0)])
    with pytest.raises(ValueError, match="node 0 is required to be a cause of node 2, which other knowledge forbids"):
        knowledge_of(3, forbidden=[(0, 2)], required=[(0, 1), (1, 2)])
    with pytest.raises(ValueError, match="node 1 is required to be a cause of node 0"):
        knowledge_of(2, tiers=[0, 1], required=[(1, 0)])
    test = Known(set(), 3)
    with pytest.raises(ValueError, match="knowledge must be about the 3 nodes of the test, got 2"):
        icd(test, knowledge=knowledge_of(2))
    with pytest.raises(ValueError, match="background knowledge and selection exclude each other"):
        icd(test, selection=True, knowledge=knowledge_of(3, required=[(0, 1)]))
    with pytest.raises(ValueError, match="either tiers or knowledge"):
        icd(test, tiers=[0, 0, 1], knowledge=knowledge_of(3))
