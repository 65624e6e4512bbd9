"""Ablations as tables and maps, with all parts and whole heads."""

import io

import pytest
from rich.console import Console

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.pages import terminal

KINDS = (*PARTS, "zero", "mean")


def ablation(parts):
    change = {"change": 0.0123, "low": 0.0023, "high": 0.0223}
    rows = [
        {"layer": layer, "head": head, "part": part, **change} for layer in (0, 1) for head in (0, 1) for part in parts
    ]
    return Ablation(model={"name": "a model", "layers": 2, "width": 8}, loss=3.0, sequences=32, by="head", rows=rows)


@pytest.mark.parametrize("parts", [PARTS, KINDS])
@pytest.mark.parametrize("width", [80, 100])
def test_a_table_shows_every_head_part_and_interval(parts, width):
    out = io.StringIO()
    terminal.show(ablation(parts), Console(file=out, width=width))
    text = out.getvalue()
    assert [text.count(f"{layer}.{head} ") for layer in (0, 1) for head in (0, 1)] == [1] * 4
    assert text.count("+0.0123") == text.count("±0.0100*") == 4 * len(parts)
    assert width < 100 or "…" not in text  # seven names are wider than 80 letters; the numbers are all there


def test_a_map_has_a_panel_for_each_part_and_whole_heads():
    pytest.importorskip("matplotlib")
    figure = ablation(KINDS).plot()
    names = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert names == [*(f"{part} ablated" for part in PARTS), "head to 0", "head to mean"]


def by_direction(count):
    sizes = {"value": 2.5, "share": 0.25, "change": 0.0123, "low": 0.0023, "high": 0.0223}
    rows = [{"layer": 1, "head": 2, "part": "skew", "direction": number, **sizes} for number in range(count)]
    return Ablation(model={"name": "a model", "layers": 2}, loss=3.0, sequences=32, by="direction", rows=rows)


def test_directions_are_listed_with_value_share_and_cost():
    out = io.StringIO()
    terminal.show(by_direction(60), Console(file=out, width=100))
    text = out.getvalue()
    assert "change with one direction ablated" in text
    assert text.count("1.2 ") == text.count("25.0%") == text.count("+0.0123 ±0.0100*") == 48
    assert "The 48 costliest of 60" in text


def test_directions_are_bars_with_intervals():
    pytest.importorskip("matplotlib")
    [axis] = by_direction(3).plot().axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"1.2  direction {i}" for i in range(3)]
    assert [bar.get_width() for bar in axis.patches] == [0.0123] * 3
