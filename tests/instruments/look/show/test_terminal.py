"""Looks and comparisons in the terminal: bars of one kind, their window, and how labels are known."""

import dataclasses
import io
import re

import pytest
import torch
from rich.console import Console

import keyquery as kq
from keyquery.instruments.look.show.shares import bar_shares, window
from keyquery.instruments.look.show.terminal import MARKS, Bar
from tests.instruments.look.show.test_triangle import look
from tests.pages.readings import crowd, shown


@pytest.mark.parametrize(("width", "letters"), [(100, 24), (20, 20)])
def test_a_bar_is_as_wide_as_there_is_room(width, letters):
    out = io.StringIO()
    Console(file=out, width=width).print(Bar([0.5, 0.25, 0.0, 0.0, 0.25]))
    marks = [mark for mark, _ in MARKS.values()]
    expected = letters // 2 * marks[0] + letters // 4 * marks[1] + letters // 4 * marks[4]
    assert out.getvalue().strip() == expected


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.5, 0.2, 0.1, 0.1), [0.5, 0.2, 0.1, 0.0, 0.1, 0.0]),  # an interaction of 0.1 is left blank
        ((0.6, 0.3, 0.3, 0.0), [0.5, 0.25, 0.25, 0.0, 0.0, 0.0]),  # one of −0.2: in proportion
        ((0.5, -0.01, 0.2, 0.3), [0.5, 0.0, 0.2, 0.0, 0.3, 0.0]),  # an estimate below 0 is drawn as 0
    ],
)
def test_bars_hold_shares(shares, expected):
    assert bar_shares(look(shares).heads[0]) == pytest.approx(expected)


def test_the_leading_share_has_its_half_interval():
    assert "60 ±4 %" in shown(look((0.1, 0.1, 0.2, 0.6), half=0.04))
    assert "±" not in shown(look((0.1, 0.1, 0.2, 0.6)))  # few sequences have no intervals


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "128-token windows, 156 sequences"),
        ({"length": 127}, "128-token windows, 156 sequences"),  # the last window of a text is shorter
        ({"length": 40}, "40-token windows, 156 sequences"),
    ],
)
def test_the_window_is_named(facts, words):
    reading = look((0.1, 0.1, 0.2, 0.6))
    data = {**reading.provenance["data"], **facts}
    reading = dataclasses.replace(reading, provenance={"data": data})
    assert window(reading) == words
    assert words in shown(reading)
    assert words in shown(kq.compare(reading, look((0.3, 0.1, 0.2, 0.4))), 120)
    assert window(look(0.5)) is None


def test_labels_say_how_they_are_known():
    reading = look((0.1, 0.1, 0.2, 0.6), (0.5, 0.2, 0.2, 0.1))
    first, second = reading.heads
    on_data = {**second["on_data"], "changes_with_window": ["symmetry"]}
    heads = [{**first, "evidence": "measured"}, {**second, "on_data": on_data}]
    text = shown(dataclasses.replace(reading, heads=heads))
    assert "mixed\n" in text.replace(" ", "")
    assert "mixed~" in text
    assert "+0.00†" in text
    assert "~ label from estimated costs" in text
    assert "† sign differs in the first half" in text
    assert "° label from the weights only" in shown(kq.look(torch.nn.MultiheadAttention(8, 2)))


def test_costs_stand_beside_variance():
    """Nats of the head switched off and of its costliest part, and the needs of the costliest heads in a sentence."""
    reading = look(*[(0.1, 0.1, 0.2, 0.6)] * 5)
    needs = {"label": "position", "needs": ["position"]}
    heads = [
        {
            **head,
            **(needs if number else {"label": "undecided", "needs": None}),
            "reason": f"needs position (0.{number}00 nats); all else could go for 0.001",
            "ablation": {"zero": [number / 10, 0, 1], "skew": [0.002, 0, 1], "position": [number / 20, 0, 1]},
        }
        for number, head in enumerate(reading.heads)
    ]
    costs = {"sequences": 32, "objective": "next token", "unit": "nats per token", "threshold": 0.003}
    text = shown(dataclasses.replace(reading, heads=heads, provenance={**reading.provenance, "costs": costs}), 110)
    rows = {line.split()[0]: line for line in text.splitlines() if re.match(r"\d\.0 ", line)}
    assert "0.400" in rows["4.0"]
    assert "░ 0.200" in rows["4.0"]
    assert "▓ 0.002" in rows["0.0"]
    assert "Labels: 4 position, 1 undecided." in text
    assert "costs at most 0.003 nats per token on 32 sequences" in " ".join(text.split())
    assert [number for number in range(5) if f"{number}.0 needs position (0.{number}00 nats)" in text] == [2, 3, 4]
    assert "nats" not in shown(reading)
    note = {**reading.provenance, "costs": {"note": "no costs: no mask token"}}
    assert "Note: no costs: no mask token." in shown(dataclasses.replace(reading, provenance=note))


def test_bars_of_two_kinds_are_never_in_one_table():
    data, weights = look((0.1, 0.1, 0.2, 0.6)), look(0.5)
    text = shown(kq.compare(data, weights))
    assert text.count("bars: ") == 2
    assert text.index("bars: shares of score variance") < text.index("bars: ‖S‖² and ‖A‖² of the weights")
    assert shown(kq.compare(data, look((0.2, 0.1, 0.1, 0.6)))).count("bars: ") == 1
    cross = shown(look((0.1, 0.1, 0.2, 0.6), 0.5))  # a head without data beside one with
    assert "not on data" in cross
    assert cross.count("bars: ") == 1


@pytest.mark.unchecked  # as users run it: the checks would look at every number of the reading
def test_many_heads_are_shown_by_layer():
    text = shown(crowd(12, 16, 4, 2, True))
    assert "12 layers, 192 heads" in text
    assert "mean over heads" in text
    assert "--layers to select some" in text
    assert text.count("█") > 12
    assert max(map(len, text.splitlines())) <= 100
    both = shown(kq.compare(crowd(12, 16, 4, 2, True), crowd(12, 16, 4, 2, False)))
    assert "128-token windows, 156 sequences" in both
