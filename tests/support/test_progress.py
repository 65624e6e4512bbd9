"""Bars: there while something runs, and gone afterwards, however it ends."""

import subprocess
import sys
import threading

import pytest

from keyquery.support import progress
from keyquery.support.progress import bars, silent


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


def test_nothing_is_printed_where_nobody_looks():
    code = "from keyquery.support.progress import bars\n"
    code += "with bars(True) as watch: print(list(watch([1, 2], 'counting', 2)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[1, 2]\n", "")


def test_bars_that_are_not_wanted_are_none():
    with bars(wanted=False) as progress:
        assert progress is silent


def test_long_computations_print_lines_where_there_is_no_terminal(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with bars(wanted=True) as watch:
        assert list(watch(range(4), "counting", 4)) == [0, 1, 2, 3]
    assert capsys.readouterr().err.splitlines() == ["counting: 1 of 4, 6 s", "counting: 3 of 4, 12 s"]
