"""Labels follow from figures and their intervals, and thresholds can be moved."""

import pytest

from keyquery.instruments.look.labels import LABELS, Thresholds, label_head, properties

WEIGHTS = {"symmetry": 0.1, "positive_share": 0.5, "effective_rank": 50.0}
PARTS = ("symmetric", "skew", "popularity", "query_only", "position")


def on_data(half_width=0.02, sink=0.0, **shares):
    """Figures on data: the parts that are given, all others nothing, each with the same interval."""
    values = {**dict.fromkeys(PARTS, 0.0), **shares}
    values["pairwise"] = values["symmetric"] + values["skew"]
    intervals = {part: [value - half_width, value + half_width] for part, value in values.items()}
    ranks = {"effective_rank_symmetric": 60.0, "effective_rank_skew": 50.0}
    return {**values, **ranks, "symmetry": 0.0, "sink": sink, "intervals": intervals}


@pytest.mark.parametrize(
    ("data", "label"),
    [
        (on_data(position=0.9), "position"),
        (on_data(position=0.9, sink=0.7), "sink"),
        (on_data(position=0.9, sink=0.3), "position"),
        (on_data(popularity=0.7), "popularity"),
        (on_data(symmetric=0.8), "symmetric"),
        (on_data(skew=0.8), "skew"),
        (on_data(symmetric=0.4, skew=0.4), "pairwise"),
        (on_data(symmetric=0.3, popularity=0.3, position=0.3), "mixed"),
        (on_data(half_width=0.2, position=0.7), "undecided"),
        (on_data(query_only=0.9), "mixed"),
        ({**on_data(), "intervals": dict.fromkeys((*PARTS, "pairwise"))}, "undecided"),
        ({k: v for k, v in on_data(popularity=0.7).items() if k != "intervals"}, "popularity"),
    ],
)
def test_labels_from_variance(data, label):
    known = label_head(WEIGHTS, data)
    assert known.label == label
    assert known.label in LABELS
    assert known.evidence == "variance"
    assert "from variance only" in known.reason


COSTS = {part: [0.0, -0.0002, 0.0002] for part in PARTS}
HIGH, OPEN = [0.05, 0.04, 0.06], [0.01, 0.005, 0.02]


@pytest.mark.parametrize(
    ("needed", "data", "label", "evidence"),
    [
        ({"position": HIGH}, on_data(popularity=0.9), "position", "ablation"),
        ({"position": HIGH, "query_only": HIGH}, on_data(), "position", "ablation"),
        ({"position": HIGH}, on_data(position=0.5, sink=0.4), "sink", "ablation"),
        ({"symmetric": HIGH, "skew": HIGH}, on_data(position=0.9), "pairwise", "ablation"),
        ({"symmetric": HIGH}, on_data(), "symmetric", "ablation"),
        ({"popularity": HIGH, "skew": HIGH}, on_data(), "mixed", "ablation"),
        ({"popularity": HIGH, "skew": OPEN}, on_data(), "undecided", "ablation"),
        ({}, on_data(position=0.9), "position", "variance"),
    ],
)
def test_labels_from_ablation_come_first(needed, data, label, evidence):
    known = label_head(WEIGHTS, data, {**COSTS, **needed})
    assert (known.label, known.evidence) == (label, evidence)


def test_thresholds_can_be_moved():
    assert label_head(WEIGHTS, on_data(position=0.5)).label == "mixed"
    assert label_head(WEIGHTS, on_data(position=0.5), None, Thresholds(share=0.4)).label == "position"
    costs = {**COSTS, "skew": HIGH}
    assert label_head(WEIGHTS, on_data(position=0.9), costs, Thresholds(loss=0.1)).label == "position"


@pytest.mark.parametrize(("symmetry", "label"), [(0.9, "symmetric"), (-0.9, "skew"), (0.5, "undecided")])
def test_weights_alone_say_little(symmetry, label):
    known = label_head({**WEIGHTS, "symmetry": symmetry})
    assert (known.label, known.evidence) == (label, "weights")


def test_properties_are_no_labels():
    assert properties({**WEIGHTS, "symmetry": 0.9, "positive_share": 0.99}, None, 64) == ["psd"]
    assert properties({**WEIGHTS, "effective_rank": 7.4}, None, 64) == ["low rank 7"]
    small = {**on_data(), "effective_rank_symmetric": 20.0, "effective_rank_skew": 6.2}
    assert properties(WEIGHTS, small, 64) == ["split 20:6"]
    assert properties(WEIGHTS, on_data(), 64) == []
