"""Explanations: known parents are found with few calls, and what is found is what brute force finds."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.learn.causes.causes import Causes
from tests.learn.discovery.sems import random_sem


def two_parents(rng):
    """A random model of nine tokens, and one of them with exactly two parents."""
    while True:
        sem = random_sem(rng, hidden=0)
        able = [node for node in sem.graph if sem.graph.in_degree(node) == 2]
        if able:
            target = int(rng.choice(able))
            return sem, target, sorted(sem.graph.predecessors(target))


@pytest.mark.slow
def test_two_known_parents_are_found_with_few_calls():
    # The prediction flips if and only if both parents are masked.
    rng, calls = np.random.default_rng(0), []
    for _ in range(50):
        sem, target, parents = two_parents(rng)
        reading = kq.causes(torch.tensor(sem.attention), samples=1e10, alpha=1e-3)
        explained = kq.explain(reading, target, lambda masked, _, parents=parents: set(parents) <= set(masked))
        assert explained.sets == [parents]
        calls.append(explained.calls)
    assert np.mean(calls) <= 7


def graph_of(edges, count):
    """A reading with this graph of its only head."""
    graph = {"layer": None, "head": 0, "edges": edges, "tests": 0, "tests_by_size": [], "rounds": 1, "done": True}
    facts = {"method": "icd", "alpha": 0.01, "samples": 768.0}
    return Causes(model={"name": "m"}, tokens=list("abcdef"[:count]), nodes=range(count), graphs=[graph], **facts)


@given(seed=st.integers(0, 200), flips=st.integers(0, 30))
def test_all_smallest_sets_of_the_tree_and_no_others(seed, flips):
    rng = np.random.default_rng(seed)
    marks = ["arrow", "circle", "tail"]
    edges = [(i, j, *rng.choice(marks, 2).tolist()) for i, j in combinations(range(6), 2) if rng.random() < 0.5]
    masks = {frozenset(rng.permutation(5)[: rng.integers(1, 4)].tolist()) for _ in range(flips % 5)}

    def tester(masked, target):
        assert target == 5
        return any(one <= set(masked) for one in masks)

    asked = []
    explained = kq.explain(graph_of(edges, 6), 5, lambda masked, at: asked.append(masked) or tester(masked, at))
    assert explained.calls == len(asked) == len(set(asked))
    assert [len(one) for one in asked] == sorted(map(len, asked))
    assert all(set(one) <= set(explained.pool) for one in asked)
    smallest = min(map(len, masks), default=9)
    every = [list(one) for one in combinations(range(5), smallest) if tester(one, 5)]
    assert all(tester(one, 5) for one in explained.sets)
    if explained.sets and len(explained.sets[0]) == smallest:
        assert all(one in every for one in explained.sets)
    else:  # no smallest set is connected to the target by paths through itself
        assert not {tuple(one) for one in every} & set(asked)


def chain():
    """0 o→ 1 ←o 2 and 3 alone, as the consensus of two heads, the second of which has no edge."""
    one = torch.tensor([[1.0, 0, 0, 0], [0.3, 0.4, 0.3, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    return kq.causes(torch.stack((one, torch.eye(4))), tokens=["a", "b", "c", "d"])


def test_nearest_first_and_bounded():
    asked = []
    found = kq.explain(chain(), 0, lambda masked, _: bool(asked.append(masked)))
    assert asked == [(1,), (1, 2)]  # 2 is reached through the collider 1 alone, and 3 not at all
    assert (found.sets, found.calls, found.pool, found.done) == ([], 2, [1, 2], True)
    assert kq.explain(chain(), 0, lambda *_: False, largest=1).calls == 1
    cut = kq.explain(chain(), 0, lambda *_: False, calls=1)
    assert (cut.calls, cut.done) == (1, False)


def test_an_explanation_has_a_row_per_set():
    found = kq.explain(chain(), 0, lambda masked, _: 2 in masked)
    assert found.sets == [[1, 2]]
    assert kq.Reading.load(found.to_json()) == found
    assert found.records() == [{"target": 0, "size": 2, "positions": "1 2", "tokens": "b c"}]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": 4}, "target must be between 0 and 3, got 4"),
        ({"target": 1}, "target must be a node of the graph, got 1; nodes: 0, 2"),
        ({"largest": 0}, "largest must be at least 1"),
        *(
            ({"tester": lambda masked, target, answer=answer: answer}, "tester must return True or False, got")
            for answer in (None, 1, torch.tensor([True, False]))
        ),
    ],
)
def test_bad_input(options, sentence):
    graph = kq.causes(torch.full((4, 4), 1 / 4), nodes=[0, 2])
    with pytest.raises((ValueError, TypeError), match=sentence):
        kq.explain(graph, **{"target": 0, **options})


@pytest.mark.unchecked
@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor([True])])
def test_a_tester_may_answer_as_libraries_do(answer):
    found = kq.explain(kq.causes(torch.full((3, 3), 1 / 3)), np.int64(0), lambda masked, target: answer)
    assert found.sets == [[1], [2]]
    assert type(found.target) is int


def test_sets_are_drawn_from_what_is_named():
    graph, asked = kq.causes(torch.full((4, 4), 1 / 4)), []
    found = kq.explain(graph, 2, lambda masked, target: asked.append(masked) is not None, among=[0, 1, 2])
    assert found.pool == [0, 1]
    assert asked == [(0,), (1,), (0, 1)]
    first = kq.explain(graph, 0, lambda masked, target: len(masked) == 2, every=False)
    assert (first.sets, first.calls, first.done) == ([[1, 2]], 4, False)


def test_a_target_is_a_node_however_little_it_is_attended_to():
    attention = torch.tensor([[0.1, 0.4, 0.5, 0.0], [0.1, 0.5, 0.4, 0.0], [0.1, 0.4, 0.5, 0.0], [0.1, 0.4, 0.4, 0.1]])
    assert list(kq.causes(attention, nodes=2).nodes) == [1, 2]
    assert list(kq.causes(attention, nodes=2, target=3).nodes) == [2, 3]
    with pytest.raises(ValueError, match="target must be between 0 and 3, got 4"):
        kq.causes(attention, nodes=2, target=4)


def test_nothing_behind_the_target_is_tried_where_the_graph_has_an_order():
    attention = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.3, 0.4, 0], [0.1, 0.2, 0.4, 0.3]])
    asked = []
    found = kq.explain(kq.causes(attention), 1, lambda masked, target: bool(asked.append(masked)))
    assert found.pool == [0]
    assert asked == [(0,)]
    assert 2 in kq.explain(kq.causes(attention, causal=False), 1).pool
