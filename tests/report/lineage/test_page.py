"""The page of a lineage in a real browser: its figures, its words, and no overflow on any screen."""

import copy

import pytest
import torch

import keyquery as kq
from tests.report.conftest import CHROMIUM

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def reading():
    torch.manual_seed(0)
    base = kq.Decoder(64, depth=4, heads=4)
    other = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0
    return kq.lineage(base, other)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_page_fits_every_screen(visit, reading, scheme, width):
    tab = visit(reading, color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("figure").count() == 3
    assert tab.locator(".label").inner_text() == "fine-tuned"
    assert tab.locator("circle.dot").count() == 16
    assert "not of who copied whom" in tab.locator(".caveat").inner_text()
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")
