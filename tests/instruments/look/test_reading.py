"""Labels say what a head needs, by costs; without costs the weights say little, and variance nothing."""

import json
from itertools import combinations

import pytest

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.named import UNITS, only
from keyquery.instruments.ablation.needs import LABELS, costs_without
from keyquery.instruments.look import reading
from keyquery.instruments.look.metrics import properties

WEIGHTS = {"symmetry": 0.1, "positive_share": 0.5, "effective_rank": 50.0}
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


def label_head(data, costs, evidence="estimated", weights=WEIGHTS, threshold=0.003):
    return reading.label_head(weights, data, costs, evidence, threshold)


@pytest.mark.parametrize(
    ("needed", "data", "label"),
    [
        ((), on_data(position=0.9), "none"),
        (("position",), on_data(popularity=0.9), "position"),
        (("position",), on_data(position=0.5, sink=0.4), "sink"),
        (("position",), on_data(position=0.5, sink=0.2), "position"),
        (("symmetric", "skew"), on_data(position=0.9), "pairwise"),
        (("skew",), on_data(), "skew"),
        (("popularity",), None, "popularity"),
        (("popularity", "skew", "symmetric", "position"), on_data(), "mixed"),
    ],
)
@pytest.mark.parametrize("evidence", ["estimated", "measured"])
def test_labels_are_the_smallest_set_that_keeps_the_loss(needed, data, label, evidence):
    head = label_head(data, table(needed), evidence)
    assert (head["label"], head["needs"], head["evidence"]) == (label, sorted(needed), evidence)
    assert head["label"] in LABELS


def test_of_several_sets_of_one_size_the_cheapest_is_named():
    cheap = {"only skew": [-0.001, -0.002, 0.0], "only symmetric": [0.001, 0.0, 0.002]}
    assert label_head(None, table({"skew", "symmetric"}) | cheap)["needs"] == ["skew"]
    free = table(("skew",)) | {"only skew + position + query_only": ACROSS}  # a larger set decides nothing
    assert label_head(None, free)["label"] == "skew"


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"zero": ACROSS}, "switching it off costs 0.010 (0.001 to 0.020) nats"),
        ({"only skew": ACROSS, "only symmetric": [0.02, 0.01, 0.03]}, "keeping skew alone costs 0.010"),
        ({"only skew": [0.012, 0.002, 0.03], "only symmetric": [0.011, 0.01, 0.012]}, "keeping skew alone"),
        ({"only symmetric + skew": ACROSS}, "needs at least symmetric and skew; keeping symmetric and skew alone"),
    ],
)
def test_an_interval_across_the_threshold_is_undecided(costs, words):
    head = label_head(None, table(("symmetric", "skew")) | costs)
    assert (head["label"], head["needs"]) == ("undecided", None)
    assert words in head["reason"]


def test_the_reason_is_a_sentence():
    costs = table(("position",)) | {only(UNITS.keys() - {"position"}): [0.104, 0.1, 0.11], "zero": [0.2, 0.1, 0.3]}
    assert label_head(None, costs)["reason"] == "needs position (0.104 nats); all else could go for 0.000"
    assert label_head(None, table(()))["reason"] == "can be switched off (0.000 nats)"
    every = table(tuple(UNITS)) | {"zero": [0.2, 0.1, 0.3]}
    assert label_head(None, every)["reason"] == "needs every part (0.200 nats switched off)"


def test_models_without_positions_have_three_units():
    units = ("symmetric", "skew", "popularity")
    assert label_head(None, table(("popularity",), units))["label"] == "popularity"
    assert label_head(None, table(units, units))["needs"] == ["popularity", "skew", "symmetric"]
    without = costs_without(table(("popularity",), units))
    assert without == {"symmetric": FREE, "skew": FREE, "popularity": HIGH, "zero": HIGH}


def test_costs_of_some_sets_give_no_label():
    """Nor do those of single parts: a cost that is missing is not one of nothing."""
    costs = table(("skew",))
    del costs["only skew + popularity"]
    for some in (costs, dict.fromkeys(PARTS, FREE), {}, {"zero": FREE, "only skew": HIGH}):
        assert label_head(on_data(position=0.9), some)["evidence"] == "weights"
        assert costs_without(some).keys() == {name for name in some if not name.startswith("only ")}


def test_the_threshold_can_be_moved():
    assert label_head(None, table(("skew",)), threshold=0.1)["label"] == "none"
    assert label_head(None, table(("skew",)), threshold=0.05)["label"] == "undecided"
    looks = [kq.look(kq.models.DECODER, kq.models.TEXT, layers=[3], tokens=800, threshold=x) for x in (0.003, 9.0)]
    assert [look.provenance["costs"]["threshold"] for look in looks] == [0.003, 9.0]
    assert {head["label"] for head in looks[1].heads} == {"none"} != {head["label"] for head in looks[0].heads}


@pytest.mark.parametrize(("symmetry", "label"), [(0.9, "symmetric"), (-0.9, "skew"), (0.5, "undecided")])
def test_weights_alone_say_little_and_variance_nothing(symmetry, label):
    for data in (None, on_data(position=0.99)):
        head = label_head(data, None, weights={**WEIGHTS, "symmetry": symmetry})
        assert (head["label"], head["evidence"]) == (label, "weights")


def test_properties_are_no_labels():
    assert properties({**WEIGHTS, "symmetry": 0.9, "positive_share": 0.99}, None, 64) == ["psd"]
    assert properties({**WEIGHTS, "effective_rank": 7.4}, None, 64) == ["low rank 7"]
    small = {**on_data(), "effective_rank_symmetric": 20.0, "effective_rank_skew": 6.2}
    assert properties(WEIGHTS, small, 64) == ["split 20:6"]
    assert properties(WEIGHTS, on_data(), 64) == []


def test_json_has_the_promised_form():
    look = kq.look(kq.models.DECODER, kq.models.TEXT, layers=[1], tokens=2000, length=16, cost=False)
    data = json.loads(look.to_json())
    assert (data["schema"], data["kind"]) == (2, "look")
    assert set(data["layers"][0]) >= {"layer", "name", "raw"}
    head = data["heads"][0]
    assert set(head) >= {"layer", "head", "name", "raw", "folded", "on_data", "label"}
    spectra = {"eigenvalues", "skew_values", "singular_values"}
    assert set(head["raw"]) >= {"symmetry", "column_directionality", "positive_share", "effective_rank", *spectra}
    metrics = {"symmetry", *PARTS, "interaction", "sink", "effective_rank_symmetric", "effective_rank_skew"}
    assert set(head["on_data"]) == {*metrics, "intervals", "half_window", "changes_with_window", "interactions"}
    assert set(head["on_data"]["intervals"]) == {*metrics, "pairwise"}
    row = look.records()[0]
    assert row["on_data_skew_low"] < row["on_data_skew"] == head["on_data"]["skew"] < row["on_data_skew_high"]
    assert kq.Reading.load(look.to_json()) == look
