"""Labels say what a head needs, by costs; without costs the weights say little, and variance nothing."""

from itertools import combinations

import pytest

from keyquery.instruments.ablation.named import UNITS, only
from keyquery.instruments.ablation.needs import costs_without
from keyquery.instruments.look.labels import LABELS, Thresholds, label_head, properties

WEIGHTS = {"symmetry": 0.1, "positive_share": 0.5, "effective_rank": 50.0}
PARTS = ("symmetric", "skew", "popularity", "query_only", "position")
FREE, HIGH, ACROSS = [0.0, -0.0002, 0.0002], [0.05, 0.04, 0.06], [0.01, 0.001, 0.02]


def on_data(sink=0.0, **shares):
    """Metrics on data: the parts that are given, all others nothing."""
    ranks = {"effective_rank_symmetric": 60.0, "effective_rank_skew": 50.0}
    return {**dict.fromkeys(PARTS, 0.0), **shares, **ranks, "symmetry": 0.0, "sink": sink}


def table(needed, units=tuple(UNITS), **exceptions):
    """The cost of every set of units alone: nothing where it holds the needed ones, else high."""
    sets = [set(kept) for size in range(1, len(units)) for kept in combinations(units, size)]
    costs = {only(kept): FREE if set(needed) <= kept else HIGH for kept in sets}
    return {"zero": HIGH if needed else FREE, **costs, **exceptions}


@pytest.mark.parametrize(
    ("needed", "data", "label"),
    [
        ((), on_data(position=0.9), "none"),
        (("position",), on_data(popularity=0.9), "position"),
        (("position",), on_data(position=0.5, sink=0.4), "sink"),
        (("position",), on_data(position=0.5, sink=0.2), "position"),
        (("symmetric", "skew"), on_data(position=0.9), "pairwise"),
        (("symmetric",), on_data(), "symmetric"),
        (("skew",), on_data(), "skew"),
        (("popularity",), None, "popularity"),
        (("popularity", "skew"), on_data(), "mixed"),
        (("popularity", "skew", "symmetric", "position"), on_data(), "mixed"),
    ],
)
@pytest.mark.parametrize("evidence", ["estimated", "measured"])
def test_labels_are_the_smallest_set_that_keeps_the_loss(needed, data, label, evidence):
    head = label_head(WEIGHTS, data, table(needed), evidence)
    assert (head["label"], head["needs"], head["evidence"]) == (label, sorted(needed), evidence)
    assert head["label"] in LABELS


def test_of_several_sets_of_one_size_the_cheapest_is_named():
    cheap = {"only skew": [-0.001, -0.002, 0.0], "only symmetric": [0.001, 0.0, 0.002]}
    assert label_head(WEIGHTS, None, table({"skew", "symmetric"}) | cheap)["needs"] == ["skew"]


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"zero": ACROSS}, "switching it off costs 0.010 (0.001 to 0.020) nats"),
        ({"only skew": ACROSS}, "keeping skew alone costs 0.010 (0.001 to 0.020) nats"),
        ({"only skew": ACROSS, "only symmetric": [0.02, 0.01, 0.03]}, "keeping skew alone"),
        ({"only skew": [0.012, 0.002, 0.03], "only symmetric": [0.011, 0.01, 0.012]}, "keeping skew alone"),
        (
            table(("symmetric", "skew", "popularity")) | {"only symmetric + skew": ACROSS},
            "keeping symmetric and skew alone",
        ),
    ],
)
def test_an_interval_across_the_threshold_is_undecided(costs, words):
    head = label_head(WEIGHTS, None, table(("symmetric", "skew")) | costs)
    assert (head["label"], head["needs"]) == ("undecided", None)
    assert words in head["reason"]


def test_an_undecided_head_needs_some_parts_in_any_case():
    costs = table(("symmetric", "skew")) | {"only symmetric + skew": ACROSS}
    words = "needs at least symmetric and skew; keeping symmetric and skew alone costs 0.010 (0.001 to 0.020) nats"
    assert label_head(WEIGHTS, None, costs)["reason"] == words
    assert label_head(WEIGHTS, None, table(()) | {"zero": ACROSS})["reason"].startswith("switching it off costs")


def test_a_larger_set_does_not_make_a_smaller_one_undecided():
    free = table(("skew",)) | {"only skew + position + query_only": ACROSS}
    assert label_head(WEIGHTS, None, free)["label"] == "skew"


def test_the_reason_is_a_sentence():
    costs = table(("position",)) | {only(UNITS.keys() - {"position"}): [0.104, 0.1, 0.11], "zero": [0.2, 0.1, 0.3]}
    assert label_head(WEIGHTS, None, costs)["reason"] == "needs position (0.104 nats); all else could go for 0.000"
    assert label_head(WEIGHTS, None, table(()))["reason"] == "can be switched off (0.000 nats)"
    every = table(tuple(UNITS)) | {"zero": [0.2, 0.1, 0.3]}
    assert label_head(WEIGHTS, None, every)["reason"] == "needs every part (0.200 nats switched off)"


def test_models_without_positions_have_three_units():
    units = ("symmetric", "skew", "popularity")
    assert label_head(WEIGHTS, None, table(("popularity",), units))["label"] == "popularity"
    assert label_head(WEIGHTS, None, table(units, units))["needs"] == ["popularity", "skew", "symmetric"]
    without = costs_without(table(("popularity",), units))
    assert without == {"symmetric": FREE, "skew": FREE, "popularity": HIGH, "zero": HIGH}


def test_costs_of_some_sets_give_no_label():
    """Nor do those of single parts: a cost that is missing is not one of nothing."""
    costs = table(("skew",))
    del costs["only skew + popularity"]
    for some in (costs, dict.fromkeys(PARTS, FREE), {}, {"zero": FREE, "only skew": HIGH}):
        assert label_head(WEIGHTS, on_data(position=0.9), some)["evidence"] == "weights"
        assert costs_without(some).keys() == {name for name in some if not name.startswith("only ")}


def test_the_cost_without_a_part_is_that_of_its_complement_alone():
    costs = table(("position",)) | {
        "only skew + popularity + position + query_only": [0.5, 0.4, 0.6],
        "query_only": FREE,
    }
    without = costs_without(costs)
    assert without == {
        "symmetric": [0.5, 0.4, 0.6],
        "skew": FREE,
        "popularity": FREE,
        "position": HIGH,
        "zero": HIGH,
    } | {"query_only": FREE}


def test_the_threshold_can_be_moved():
    assert label_head(WEIGHTS, None, table(("skew",)), thresholds=Thresholds(loss=0.1))["label"] == "none"
    assert label_head(WEIGHTS, None, table(("skew",)), thresholds=Thresholds(loss=0.05))["label"] == "undecided"


@pytest.mark.parametrize(("symmetry", "label"), [(0.9, "symmetric"), (-0.9, "skew"), (0.5, "undecided")])
@pytest.mark.parametrize("data", [None, on_data(position=0.99)])
def test_weights_alone_say_little_and_variance_nothing(symmetry, label, data):
    head = label_head({**WEIGHTS, "symmetry": symmetry}, data)
    assert (head["label"], head["evidence"]) == (label, "weights")


def test_properties_are_no_labels():
    assert properties({**WEIGHTS, "symmetry": 0.9, "positive_share": 0.99}, None, 64) == ["psd"]
    assert properties({**WEIGHTS, "effective_rank": 7.4}, None, 64) == ["low rank 7"]
    small = {**on_data(), "effective_rank_symmetric": 20.0, "effective_rank_skew": 6.2}
    assert properties(WEIGHTS, small, 64) == ["split 20:6"]
    assert properties(WEIGHTS, on_data(), 64) == []
