"""Bars: there while something runs, and gone afterwards, however it ends."""

import threading

import pytest

from keyquery.support import progress
from keyquery.support.progress import Runs, bar, bars, silent
from tests.support.test_printable import HOSTILE


def test_a_bar_that_is_broken_off_is_closed(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    before = set(threading.enumerate())

    def work():
        with bars(wanted=True) as progress:
            for number in progress(range(3), "counting", 3):
                assert set(threading.enumerate()) > before  # what draws it
                if number == 1:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as told:
        work()
    assert told.traceback  # it holds what was running
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("tokens", [0, 7000])
def test_a_bar_shows_its_rate_and_no_markup_or_command(tokens, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    items = Runs([1, 2], tokens) if tokens else [1, 2]
    assert list(bar(items, HOSTILE + "x" * 5000, 2)) == [1, 2]
    drawn = capsys.readouterr().err
    assert "\x1b]0;" not in drawn
    assert "\\x1b]0;owned" in drawn
    assert drawn.count("x" * 100) == 0
    assert ("tokens/s" in drawn) is (tokens > 0)
    assert "2/2" in drawn


def test_without_a_terminal_there_are_lines_now_and_then_or_nothing(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with bars(wanted=True) as watch:
        assert list(watch(range(4), "counting", 4)) == [0, 1, 2, 3]
    assert capsys.readouterr().err.splitlines() == ["counting: 1 of 4, 11 s", "counting: 3 of 4, 22 s"]
    for options in ({"wanted": True, "logged": False}, {"wanted": False}):
        with bars(**options) as watch:
            assert watch is silent
