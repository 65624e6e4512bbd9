"""Verdicts follow from figures, and thresholds can be moved."""

import pytest

from keyquery.instruments.verdict import Thresholds, verdict

GENERAL = {"symmetry": 0.1, "positive_share": 0.5, "effective_rank": 50.0}
DATA = {
    "symmetry": 0.1,
    "popularity": 0.1,
    "effective_rank_symmetric": 60.0,
    "effective_rank_skew": 50.0,
}


@pytest.mark.parametrize(
    ("weights", "data", "ruling", "reason"),
    [
        ({}, None, "general", "from the weights alone"),
        ({"symmetry": 0.9}, None, "symmetric", "symmetry 0.90"),
        ({"symmetry": 0.9, "positive_share": 0.99}, None, "psd", "99 % of S positive"),
        ({"symmetry": -0.9}, None, "skew", "symmetry -0.90"),
        ({"effective_rank": 7.4}, None, "low rank 7", "effective rank 7.4 of 64"),
        ({}, {}, "general", "on data"),
        ({"symmetry": 0.9}, {}, "general", "on data"),
        ({}, {"symmetry": 0.9}, "symmetric", "on data"),
        ({}, {"popularity": 0.7}, "popularity", "70% of its variance"),
        ({}, {"effective_rank_symmetric": 20.0, "effective_rank_skew": 6.2}, "split 20:6", "fit into 64 dimensions"),
    ],
)
def test_verdicts(weights, data, ruling, reason):
    given = verdict({**GENERAL, **weights}, None if data is None else {**DATA, **data}, rank=64)
    assert given[0] == ruling
    assert reason in given[1]


def test_thresholds_can_be_moved():
    weights = {**GENERAL, "symmetry": 0.5}
    assert verdict(weights, None, 64)[0] == "general"
    assert verdict(weights, None, 64, Thresholds(symmetry=0.4))[0] == "symmetric"
