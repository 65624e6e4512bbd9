"""The page of a lineage in a real browser: its figures, its words, and no overflow on any screen."""

import copy

import pytest
import torch

import keyquery as kq
from keyquery.instruments.lineage.index import Relatives
from tests.conftest import CHROMIUM

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
    assert tab.locator("canvas").count() == 1
    assert tab.locator(".lead").inner_text().endswith(": fine-tuned.")
    assert tab.locator("circle.dot").count() == 16
    assert "not of who copied whom" in tab.locator("#notes").inner_text()
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")


def test_relatives_have_a_page_with_every_model_that_was_tested(visit):
    row = {"model": "near", "related": True, "p": 1e-9, "basis_free": 20.0, "shared_basis": None}
    other = {"model": "far", "related": False, "p": 0.5, "basis_free": 0.1, "shared_basis": 0.3}
    tab = visit(Relatives(model="mine", searched=5, comparable=2, rows=[row, other]))
    assert tab.locator(".lead").inner_text() == "1 model of 5 shares weights with mine."
    tab.locator('[data-sort="p (adjusted)"]').click()
    assert tab.locator("tbody th").all_inner_texts() == ["near", "far"]
    tab.locator('[data-sort="basis-free"]').click()
    assert tab.locator("tbody th").all_inner_texts() == ["near", "far"]
    tab.locator('[data-sort="basis-free"]').click()
    assert tab.locator("tbody th").all_inner_texts() == ["far", "near"]
