"""Ablations as tables and maps, with all parts and whole heads."""

import pytest

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.instruments.ablation.show import cost_measures
from tests.pages.readings import shown

KINDS = (*PARTS, "zero", "mean")
COST = {"change": 0.0123, "low": 0.0023, "high": 0.0223}
CHECK = {"cells": 24, "rank_correlation": 0.97, "slope": 1.02, "inside": 0.96, "poor": []}


def ablation(rows, **facts):
    facts = {"model": {"name": "a model", "layers": 2, "width": 8}, "by": "head", **facts}
    return Ablation(loss=3.0, sequences=32, rows=rows, **facts)


def by_part():
    return ablation([{"layer": n // 2, "head": n % 2, "part": part, **COST} for n in range(4) for part in KINDS])


def estimated(count, **fields):
    """Rows of estimates, of which the first is measured too."""
    cost = {**COST, "flags": [], "evidence": "estimated"}
    rows = [{"layer": n, "head": 2, "part": "skew", **cost, "change": n / 100, **fields} for n in range(count)]
    rows[0] |= {"evidence": "measured"}
    return rows


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_shows_every_head_part_and_interval(width):
    text = shown(by_part(), width)
    assert [text.count(f"{layer}.{head} ") for layer in (0, 1) for head in (0, 1)] == [1] * 4
    assert text.count("+0.0123") == text.count("±0.0100*") == 4 * len(KINDS)
    assert width < 100 or "…" not in text  # seven names are wider than 80 letters; the numbers are all there


def test_estimates_are_marked_and_the_costliest_rows_shown():
    text = shown(ablation(estimated(60), check=CHECK))
    assert "estimates against measurements of 24 cells: rank correlation 0.97, slope 1.02, 96% inside the noise" in text
    assert text.count("±0.0100*") == text.count("~+0.") == 48
    assert "~+0.5900" in text
    assert "~: estimated, not measured (59 of 60)." in text
    assert "60 of 60 intervals contain the threshold of 0.003." in text
    assert "The 48 of 60 rows with the largest changes" in text
    assert "Estimates are poor" not in text


def test_poor_estimates_are_said_above_the_table():
    text = shown(ablation(estimated(3), check=CHECK | {"rank_correlation": 0.5, "poor": ["rank_correlation"]}))
    warning = "Estimates are poor for this model and text (rank correlation): use --measure all"
    assert text.index(warning) < text.index("2.2")
    assert "+0.0000 ±0.0100" in text


def test_key_heads_and_sets_are_named():
    assert "0 key head 1" in shown(ablation(estimated(2, head=None, key_head=1)))
    assert "induction" in shown(ablation(estimated(1, layer=None, head=None, set="induction"), by="set"))


def test_measures_of_a_page_are_in_the_order_of_parts():
    costs = dict.fromkeys(("zero", "skew", "symmetric"), (0.1, 0.0, 0.2))
    assert [measure["short"] for measure in cost_measures([costs])] == ["cost", "symmetric", "skew", "zero"]
    assert cost_measures([{}]) == []


def test_maps_have_a_panel_for_each_change_and_a_column_for_each_key_head():
    pytest.importorskip("matplotlib")
    names = [axis.get_title() for axis in by_part().plot().axes if axis.get_title()]
    assert names == [*(f"{part} ablated" for part in PARTS), "head to 0", "head to mean"]
    keys = ablation(estimated(3, head=None, key_head=1, part="keys 4"))
    [axis] = [axis for axis in keys.plot().axes if axis.get_title()]
    assert axis.get_title() == "keys 4 ablated"
    assert axis.images[0].get_array()[:, 1].tolist() == [0.0, 0.01, 0.02]
