"""A monitored training in the terminal, as a figure and in the browser."""

import io

import pytest
from rich.console import Console

from keyquery.instruments.monitor.reading import Monitored
from keyquery.report.monitor.page import monitor_page
from keyquery.report.monitor.terminal import monitor_lines
from tests.report.conftest import CHROMIUM


def reading(count=4):
    heads = [
        {"layer": at // 2, "head": at % 2, "name": f"model.decoder.blocks.{at // 2}.attention.{at % 2}"}
        for at in range(count)
    ]
    curves = {"largest": [[1.0, 1234567.0 + at] for at in range(count)], "bound": [[None, 2e9]] * count}
    alarm = {"step": 50, "rule": "growth", "heads": [3], "head": 3, "value": 1.0, "reason": "growth: x: too large"}
    loss = {"step": 0, "rule": "loss", "heads": [], "head": None, "value": 3.0, "reason": "loss: the loss is 3"}
    return Monitored(model={"name": "a"}, steps=[0, 50], heads=heads, curves=curves, alarms=[loss, alarm])


def test_every_head_of_the_table_can_be_recognised_in_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    for line in monitor_lines(reading()):
        console.print(line)
    text = console.export_text()
    for name in ("0.attention.0", "0.attention.1", "1.attention.0", "1.attention.1"):
        assert name in text
    assert "…" not in text.replace("blocks.…", "")
    assert "1.23e+06" in text
    assert "too large" in text
    assert "step 0: loss: the loss is 3" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_shows_the_head_of_the_first_alarm_and_any_other(visit, width):
    tab = visit(reading(), html=monitor_page(reading()), color_scheme="dark")
    tab.set_viewport_size({"width": width, "height": 800})
    assert tab.inner_text("#chosen") == "model.decoder.blocks.1.attention.1: largest"
    assert "step 50: growth: x: too large" in tab.inner_text("#alarms")
    tab.select_option("#head", "0")
    tab.select_option("#metric", "bound")
    assert tab.inner_text("#chosen") == "model.decoder.blocks.0.attention.0: bound"
    tab.click("#map canvas", position={"x": 5, "y": 20})
    assert tab.inner_text("#chosen") == "model.decoder.blocks.0.attention.1: bound"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("document.querySelector('#curve').scrollWidth <= innerWidth")
