"""A monitored training in the terminal, as a figure and in the browser."""

import pytest

from tests.conftest import CHROMIUM
from tests.pages.readings import monitored, shown


def test_every_head_of_the_table_can_be_recognised_in_80_columns():
    text = shown(monitored(), 80)
    for name in ("0.attention.0", "0.attention.1", "1.attention.0", "1.attention.1"):
        assert name in text
    assert "…" not in text.replace("blocks.…", "")
    assert "1.23e+06" in text
    assert "too large" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_shows_the_head_of_the_first_alarm_and_any_other(visit, width):
    tab = visit(monitored(), color_scheme="dark")
    tab.set_viewport_size({"width": width, "height": 800})
    assert "step 50: growth: x: too large" in tab.locator(".lead").inner_text()
    assert tab.locator(".of-curve h3").inner_text() == "1.attention.1: largest"
    assert "step 50: growth: x: too large" in tab.locator(".of-list").inner_text()
    tab.get_by_label("metric shown on the map").select_option("bound")
    assert tab.locator(".of-curve h3").inner_text() == "1.attention.1: bound"
    box = tab.locator("canvas").bounding_box()
    tab.mouse.click(box["x"] + 5, box["y"] + box["height"] * 0.4)  # the second of four heads
    assert tab.locator(".of-curve h3").inner_text() == "0.attention.1: bound"
    assert tab.evaluate("location.hash") == "#0.attention.1/0?map=bound"
    tab.locator("canvas").press("ArrowRight")
    assert tab.locator(".of-map .readout").inner_text() == "0.attention.1/50: bound 2e9".replace("2e9", "2000000000")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
