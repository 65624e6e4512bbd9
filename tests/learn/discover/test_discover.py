"""`kq.discover`: graphs from data against the truth, knowledge, time, resamples and bad input."""

import warnings
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import fisher_exact

import keyquery as kq
from keyquery.learn.discovery.independence import IndependenceTest
from keyquery.learn.discovery.knowledge import knowledge_of
from keyquery.learn.discovery.pag import Pag
from keyquery.learn.discovery.rules import Separations, orient
from keyquery.learn.discovery.search import search
from tests.learn.discovery.sems import DSeparation, random_sem

NAMES = ["rain", "sprinkler", "grass", "shoes"]
TRUE = [[0, 2, "circle", "arrow"], [1, 2, "circle", "arrow"], [2, 3, "tail", "arrow"]]


def garden(rows=600, seed=0):
    rng = np.random.default_rng(seed)
    rain, sprinkler = rng.normal(size=(2, rows))
    grass = rain + sprinkler + 0.5 * rng.normal(size=rows)
    return np.stack([rain, sprinkler, grass, grass + 0.5 * rng.normal(size=rows)], 1)


@pytest.mark.parametrize("method", ["icd", "fci"])
@pytest.mark.parametrize("test", ["fisher-z", "mixed"])
def test_every_test_finds_the_graph_of_numbers(test, method):
    reading = kq.discover(garden(), test, method=method, names=NAMES)
    assert reading.edges == TRUE
    assert (reading.test, reading.rows, reading.done) == (test, 600, True)


def test_the_kernel_test_finds_a_graph_that_is_not_linear():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 200))
    c = a**2 + np.abs(b) * 2 + 0.3 * rng.normal(size=200)
    assert kq.discover(np.stack([a, b, c], 1), "kernel").edges == TRUE[:2]
    assert kq.discover(np.stack([a, b, c], 1)).edges != TRUE[:2]


@pytest.mark.parametrize("test", ["g2", "chi2", "mixed", "auto"])
def test_every_test_finds_the_graph_of_categories(test):
    rng = np.random.default_rng(1)
    rain, sprinkler = rng.random((2, 1500)) < 0.5
    wet = np.where(rng.random(1500) < 0.95, rain | sprinkler, rng.random(1500) < 0.5)
    shoes = np.where(rng.random(1500) < 0.9, wet, rng.random(1500) < 0.5)
    frame = pd.DataFrame({"rain": rain, "sprinkler": sprinkler, "wet": wet, "shoes": np.where(shoes, "wet", "dry")})
    reading = kq.discover(frame, test)
    assert reading.edges == TRUE
    assert reading.test == ("g2" if test == "auto" else test)


@pytest.mark.slow
def test_no_fewer_marks_are_right_than_by_causal_learn():
    # On the same 60 graphs causal-learn 0.1.4.8 (fci, "fisherz", 0.01) has 679 of 1,220 marks right.
    rng, right, marks = np.random.default_rng(5), 0, 0
    for _ in range(60):
        sem = random_sem(rng, count=10, hidden=2)
        data = rng.normal(size=(1000, len(sem.attention))) @ sem.attention.T[:, sem.observed]
        truth = search(DSeparation(sem.graph, sem.observed)).graph
        found = kq.discover(data, "fisher-z", 0.01).pag()
        both = [pair for i, j in truth.pairs() for pair in ((i, j), (j, i)) if found.adjacent[i] >> j & 1]
        right += sum(found.mark(*pair) == truth.mark(*pair) for pair in both)
        marks += 2 * len(truth.pairs())
    assert marks == 1220
    # The least number of which 679 is not significantly more, at .001: Fisher's exact test.
    assert fisher_exact([[right, marks - right], [679, marks - 679]], alternative="less").pvalue > 1e-3


class Erring(IndependenceTest):
    """0 and 1 are independent, whatever is given: with or without 2, which is adjacent to both."""

    def __init__(self, count=3):
        super().__init__(count, 1.0, 1)

    def strength(self, query):
        return 0.5 + 0.1 * bool(query.given) if {query.x, query.y} == {0, 1} else 2.0


def test_a_collider_is_decided_by_the_more_independent_of_two_tests():
    assert search(Erring(), cautious=True).graph.edges() == [(0, 2, "circle", "arrow"), (1, 2, "circle", "arrow")]

    class Less(Erring):
        """They are even more independent given 2."""

        def strength(self, query):
            return 0.5 - 0.1 * bool(query.given) if {query.x, query.y} == {0, 1} else 2.0

    assert {edge[2:] for edge in search(Less(), cautious=True).graph.edges()} == {("circle", "circle")}
    assert search(Less()).graph.edges() == [(0, 2, "circle", "arrow"), (1, 2, "circle", "arrow")]


def test_a_node_in_one_separating_set_of_two_is_left_undecided():
    class Later(Erring):
        """They are independent given 2 or given 3, which is adjacent to all: 2 is in one set of two."""

        def strength(self, query):
            apart = {query.x, query.y} == {0, 1} and query.given
            return 0.5 + 0.1 * (query.given == 0b100) if apart else 2.0

    plain, cautious = (search(Later(4), cautious=cautious).graph.edges() for cautious in (False, True))
    assert (0, 2, "circle", "arrow") in plain
    assert {edge[2:] for edge in cautious} == {("circle", "circle")}
    # 0 *→ 2 – 3, 0 and 3 apart: 2 → 3 follows by R1, unless 2 may be a collider between them.
    graph = Pag(4, [(0, 2, *"oo"), (1, 2, *"oo"), (2, 3, *"oo")])
    between = {(0, 1): 0, (0, 3): 0b100, (1, 3): 0b100}
    known = knowledge_of(4)
    orient(graph, Separations(between), False, known)
    assert graph.edges()[2] == (2, 3, "tail", "arrow")
    orient(graph, Separations(between, {(0, 3): 0b100, (1, 3): 0b100}), False, known)
    assert graph.edges()[2] == (2, 3, "circle", "circle")


def test_sets_that_depend_on_both_ends_are_tried_first():
    class Chain(Erring):
        """2 explains the dependence of 0 and 1 and is close to both; 3, 4 and 5 are close to one of them."""

        asked: ClassVar = []

        def strength(self, query):
            self.asked.append(query)
            if {query.x, query.y} == {0, 1}:
                return 0.0 if query.given == 0b100 else 2.0
            return 9.0 if 2 in (query.x, query.y) else 5.0 if 0 in (query.x, query.y) else 1.5

    test = Chain(6)
    graph = search(test, rounds=2, cautious=True).graph
    assert not graph.adjacent[0] >> 1 & 1
    singles = [query.given for query in test.asked if query[:2] == (0, 1) and query.given]
    assert singles[0] == 0b100


def test_knowledge_by_name():
    data = garden()
    tiers = kq.discover(data, names=NAMES, tiers=[["rain", "sprinkler"], ["grass"], ["shoes"]])
    assert tiers.tiers == [0, 0, 1, 2]
    assert tiers.edges == TRUE
    chain = kq.discover(data[:, [0, 2, 3]], names=["rain", "grass", "shoes"])
    assert {mark for edge in chain.edges for mark in edge[2:]} == {"circle"}
    known = kq.discover(data[:, [0, 2, 3]], names=["rain", "grass", "shoes"], required=[("rain", "grass")])
    assert known.edges[1] == [1, 2, "tail", "arrow"]
    forbidden = kq.discover(data[:, [0, 2, 3]], names=["rain", "grass", "shoes"], forbidden=[("grass", "rain")])
    assert forbidden.edges == [[0, 1, "circle", "arrow"], [1, 2, "tail", "arrow"]]


def test_series_have_no_effects_on_their_past():
    rng = np.random.default_rng(0)
    series = np.zeros((600, 2))
    for t in range(1, 600):
        series[t] = series[t - 1] @ [[0.6, 0.8], [0.0, 0.5]] + rng.normal(size=2)
    reading = kq.discover(series, names=["a", "b"], lags=2)
    assert reading.variables == ["a[t-2]", "b[t-2]", "a[t-1]", "b[t-1]", "a[t]", "b[t]"]
    assert reading.pag().mark(5, 2) == "arrow"
    assert (3, 4) not in reading.pag().pairs()
    assert all(edge[3] == "arrow" for edge in reading.edges if reading.tiers[edge[0]] < reading.tiers[edge[1]])
    assert reading.rows == 598


def test_shares_of_resamples():
    data = np.column_stack([garden(1000), np.random.default_rng(9).normal(size=1000)])
    reading = kq.discover(data, bootstrap=20)
    shares = reading.shares()
    assert [shares[pair] for pair in ((0, 2), (1, 2), (2, 3))] == [1.0, 1.0, 1.0]
    assert max([share for (_, j), share in shares.items() if j == 4], default=0) < 0.4  # noise
    for row in reading.bootstrap:
        assert sum(row["marks"].values()) == pytest.approx(row["share"])
    assert kq.discover(data, bootstrap=20) == reading  # the same seed
    assert kq.Reading.load(reading.to_json()) == reading
    assert {row["share"] for row in reading.records()} == {row["share"] for row in reading.bootstrap}


def test_inputs_are_the_same_data(tmp_path):
    data = garden(100)
    frame = pd.DataFrame(data, columns=NAMES)
    frame.to_csv(tmp_path / "garden.csv", index=False)
    expected = kq.discover(data, names=NAMES)
    for X in (frame, torch.tensor(data), tmp_path / "garden.csv", kq.data.load_table(tmp_path / "garden.csv")):
        assert kq.discover(X, names=NAMES).edges == expected.edges
    assert kq.discover(tmp_path / "garden.csv").name == "garden.csv"


def test_rows_with_missing_values_are_counted():
    data = garden(200)
    data[[3, 7], [0, 1]] = np.nan
    with pytest.warns(UserWarning, match="2 of 200 rows have a missing value and are not used"):
        reading = kq.discover(data, names=NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kq.discover(np.delete(data, [3, 7], 0), names=NAMES).edges == reading.edges
    assert (reading.rows, reading.dropped) == (198, 2)


BAD = [
    ({"X": np.zeros(5)}, ValueError, "X must be a table"),
    ({"X": np.zeros((9, 1))}, ValueError, "at least 2 columns, got 1"),
    ({"X": garden(4)}, ValueError, "at least 5 rows without a missing value, got 4"),
    ({"X": np.ones((9, 2))}, ValueError, "columns of X must vary, but these are constant: '0', '1'"),
    ({"X": pd.DataFrame({"d": pd.date_range("2020", periods=9), "x": range(9)})}, TypeError, "column 'd' of X is of"),
    ({"X": pd.DataFrame({"id": list("abcdefghi"), "x": range(9)})}, ValueError, "number of categories of column 'id'"),
    ({"names": ["a", "b"]}, ValueError, "names must be 4 different strings"),
    ({"test": "pearson"}, ValueError, "test must be one of"),
    ({"test": "g2"}, ValueError, "column '0' is numeric"),
    ({"test": "fisher-z", "discrete": ["3"], "X": garden(90).round()}, ValueError, "column '3' is categorical"),
    ({"discrete": "3"}, TypeError, "discrete must be True, False or a list"),
    ({"tiers": "abc"}, ValueError, "a column of tiers must be one of"),
    ({"tiers": [["0"], ["0", "1"]]}, ValueError, "'0' is in several"),
    ({"tiers": [["0"]], "lags": 1}, ValueError, "tiers and lags exclude each other"),
    ({"forbidden": [("0", "0")]}, ValueError, "forbidden must be pairs"),
    ({"required": ["0"]}, ValueError, "required must be pairs"),
    ({"required": [("0", "1")], "tiers": [["1"], ["0"]]}, ValueError, "'0' is required to be a cause of '1'"),
    ({"required": [("0", "1")], "selection": True}, ValueError, "background knowledge and selection exclude"),
    ({"lags": 98}, ValueError, "lags must leave at least 5 rows"),
    ({"bootstrap": -1}, ValueError, "bootstrap must be at least 0"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_bad_input_is_refused_in_one_sentence(options, kind, message):
    with pytest.raises(kind, match=message.replace("(", r"\(")) as refused:
        kq.discover(**{"X": garden(100), **options})
    assert "\n" not in str(refused.value)


def test_many_rows_of_a_kernel_test_are_drawn(monkeypatch):
    monkeypatch.setattr("keyquery.learn.discover.discover.KERNEL_ROWS", 50)
    with pytest.warns(UserWarning, match="uses 50 of 100 rows"):
        assert kq.discover(garden(100), "kernel").rows == 50
