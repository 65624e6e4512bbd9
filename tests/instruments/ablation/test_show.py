"""Ablations as tables and maps, with all parts and whole heads."""

import dataclasses
import io

import pytest
from rich.console import Console

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.instruments.ablation.show import cost_measures
from keyquery.pages import terminal

KINDS = (*PARTS, "zero", "mean")


def ablation(parts):
    change = {"change": 0.0123, "low": 0.0023, "high": 0.0223}
    rows = [
        {"layer": layer, "head": head, "part": part, **change} for layer in (0, 1) for head in (0, 1) for part in parts
    ]
    return Ablation(model={"name": "a model", "layers": 2, "width": 8}, loss=3.0, sequences=32, by="head", rows=rows)


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_shows_every_head_part_and_interval(width):
    text = lines_of(ablation(KINDS), width)
    assert [text.count(f"{layer}.{head} ") for layer in (0, 1) for head in (0, 1)] == [1] * 4
    assert text.count("+0.0123") == text.count("±0.0100*") == 4 * len(KINDS)
    assert width < 100 or "…" not in text  # seven names are wider than 80 letters; the numbers are all there


def test_a_map_has_a_panel_for_each_part_and_whole_heads():
    pytest.importorskip("matplotlib")
    figure = ablation(KINDS).plot()
    names = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert names == [*(f"{part} ablated" for part in PARTS), "head to 0", "head to mean"]


def estimated(count, check=None):
    """Rows of estimates, of which the first are measured too."""
    cost = {"estimate": 0.0123, "estimate_low": 0.0023, "estimate_high": 0.0223, "change": 0.0123}
    cost |= {"low": 0.0023, "high": 0.0223, "first": 0.0, "second": 0.0123, "flags": [], "evidence": "estimated"}
    rows = [{"layer": number, "head": 2, "part": "skew", **cost, "change": number / 100} for number in range(count)]
    rows[0] |= {"evidence": "measured"}
    return Ablation(model={"name": "a model", "layers": 2}, loss=3.0, sequences=32, by="head", rows=rows, check=check)


CHECK = {"cells": 24, "rank_correlation": 0.97, "slope": 1.02, "inside": 0.96, "poor": []}


def lines_of(reading, width=100):
    out = io.StringIO()
    terminal.show(reading, Console(file=out, width=width))
    return out.getvalue()


def test_estimates_are_marked_and_the_costliest_rows_shown():
    text = lines_of(estimated(60, CHECK))
    assert "estimates against measurements of 24 cells: rank correlation 0.97, slope 1.02, 96% inside the noise" in text
    assert text.count("±0.0100*") == text.count("~+0.") == 48
    assert "~+0.5900" in text
    assert "~: estimated, not measured (59 of 60)." in text
    assert "60 of 60 intervals contain the threshold of 0.003." in text
    assert "The 48 of 60 rows with the largest changes" in text
    assert "Estimates are poor" not in text


def test_poor_estimates_are_said_above_the_table():
    text = lines_of(estimated(3, CHECK | {"rank_correlation": 0.5, "poor": ["rank_correlation"]}))
    assert text.index("Estimates are poor for this model and text (rank correlation): use --measure all") < text.index(
        "2.2"
    )
    assert "+0.0000 ±0.0100" in text


def test_key_heads_and_sets_are_named():
    reading = estimated(2)
    keys = [{**row, "head": None, "key_head": 1, "part": "keys 4"} for row in reading.rows]
    text = lines_of(dataclasses.replace(reading, rows=keys))
    assert "0 key head 1" in text
    sets = [{**row, "layer": None, "head": None, "set": "induction"} for row in reading.rows[:1]]
    assert "induction" in lines_of(dataclasses.replace(reading, rows=sets, by="set"))


def test_measures_of_a_page_are_in_the_order_of_parts():
    costs = dict.fromkeys(("zero", "skew", "symmetric"), (0.1, 0.0, 0.2))
    assert [measure["short"] for measure in cost_measures([costs])] == ["cost", "symmetric", "skew", "zero"]
    assert cost_measures([{}]) == []


def test_a_map_of_key_heads_and_layers():
    pytest.importorskip("matplotlib")
    reading = estimated(3)
    keys = [{**row, "head": None, "key_head": 1, "part": "keys 4"} for row in reading.rows]
    [axis] = [axis for axis in dataclasses.replace(reading, rows=keys).plot().axes if axis.get_title()]
    assert axis.get_title() == "keys 4 ablated"
    assert axis.images[0].get_array()[:, 1].tolist() == [0.0, 0.01, 0.02]
