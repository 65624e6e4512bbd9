"""Of the paths of a hand-built induction circuit exactly one is not zero: it is found, followed and taken out."""

from __future__ import annotations

import numpy as np
import pytest

import keyquery as kq
from tests.instruments.attribution.circuit import IDS, built


def test_the_one_path_of_an_induction_circuit_is_found_and_followed_to_the_token_before():
    query = 8  # the second 4; what followed the first 4, at 2, is at 3
    reading = kq.attribute(built(), inputs={"input_ids": IDS}, head="1.0", query=query, depth=2, without="0.0")
    assert reading.key == 3
    assert reading.weight > 0.9
    table = np.array(reading.table["raw"])
    entry = reading.sources.index("token embedding"), reading.sources.index("0.0")
    assert reading.score > 1
    assert table[entry] == pytest.approx(reading.score, rel=1e-5)
    table[entry] = 0
    assert np.abs(table).max() < 1e-6 * reading.score
    [path] = [path for path in reading.paths if path["side"] == "key"]
    assert (path["source"], path["contribution"]) == ("0.0", pytest.approx(reading.score, rel=1e-5))
    assert path["relative"] == pytest.approx(reading.by_source("key")["0.0"], rel=1e-6)
    step = path["steps"][0]
    assert step["position"] == 2
    assert step["weight"] > 0.99
    assert step["origins"][0]["source"] == "token embedding"
    assert step["origins"][0]["contribution"] == pytest.approx(path["contribution"], rel=1e-3)
    total = sum(step["contribution"] for step in path["steps"]) + path["rest"]
    assert total == pytest.approx(path["contribution"], rel=1e-6)
    [pair] = reading.ablated["pairs"]
    assert pair["weight"] > 0.9
    assert pair["without"] == pytest.approx(1 / 9, rel=1e-4)  # all scores of the query are 0
    assert pair["random"] > 0.5
    assert kq.Reading.load(reading.to_json()) == reading
    rows = reading.records()
    assert len(rows) == len(reading.sources) ** 2
    assert rows[0]["symmetric"] + rows[0]["skew"] == pytest.approx(rows[0]["relative"])


def test_all_pairs_have_that_path():
    reading = kq.attribute(built(), inputs={"input_ids": IDS}, head="1.0")
    assert reading.by_source("key")["0.0"] == pytest.approx(1, abs=1e-5)
    assert reading.by_source("query")["token embedding"] == pytest.approx(1, abs=1e-5)
    assert all(pair["key_source"] == "0.0" for pair in reading.pairs)
    null = dict(zip(reading.sources, reading.null["key"], strict=True))
    assert reading.by_source("key")["0.0"] > 2 * null["0.0"] > 0
