"""Readings in the terminal: whatever their texts hold is shown as text."""

import json

import pytest
import torch

import keyquery as kq
from keyquery.reading import Reading
from tests.pages.kinds import READINGS, spoiled
from tests.pages.kinds import reading as reading_of
from tests.pages.readings import shown
from tests.support.test_printable import HOSTILE


@pytest.mark.parametrize("name", READINGS)
def test_no_text_of_a_reading_steers_the_terminal(name):
    reading = Reading.load(json.dumps(spoiled(reading_of(name).to_dict(), HOSTILE)))
    before = reading.to_json()
    text = shown(reading)
    assert reading.to_json() == before
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b]0;owned" in text


def test_a_reading_of_any_kind_is_shown_as_its_records():
    named = kq.Cooccurrence([[0, 1], [1, 0]], ["[/b]", "b"]).project("b")
    assert "'word': '[/b]'" in shown(named)


def test_names_of_thousands_of_letters_leave_the_tables_in_sight():
    look = kq.look(torch.nn.MultiheadAttention(8, 2), name="start" + "x" * 5000 + "end")
    text = shown(look)
    assert len(text) < 3000
    assert "startxxx" in text
    other = kq.look(torch.nn.MultiheadAttention(8, 2), name=look.model["name"])  # equal heads are not shown
    beside = shown(kq.compare(look, other))
    assert len(beside) < 5000
    assert max(map(len, beside.splitlines())) <= 100
    assert beside.count("█") >= 20  # the bars are still there
