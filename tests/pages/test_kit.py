"""The page of every kind in a real browser: it opens, fits, and its map, table and address work by mouse and keys."""

import json

import pytest

from keyquery.reading import Reading
from tests.conftest import CHROMIUM
from tests.pages import kinds
from tests.pages.readings import EVIL, data_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

# Elements with text of their own that are smaller on the screen than 11 pixels.
SMALL = """() => [...document.querySelectorAll('body *')]
  .filter((one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()))
  .filter((one) => one.checkVisibility() && one.getBoundingClientRect().width > 0)
  .map((one) => {
    const matrix = one.getScreenCTM?.(), scale = matrix ? Math.hypot(matrix.a, matrix.b) : 1;
    return [scale * parseFloat(getComputedStyle(one).fontSize), one.textContent];
  }).filter(([size]) => size < 10.95)"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"  # charts follow widths
LUMINANCE = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"


@pytest.fixture(scope="module", params=sorted(kinds.READINGS))
def reading(request):
    return kinds.reading(request.param)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_and_fits_a_phone_and_a_desk(visit, reading, scheme):
    tab = visit(reading, color_scheme=scheme)
    for width in (420, 1400):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.evaluate(DRAWN)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(SMALL) == []
    assert (sum(tab.evaluate(LUMINANCE)) < 100) is (scheme == "dark")
    data = data_of(reading.page())
    assert tab.locator("h1").inner_text() == data["name"]
    assert tab.title() == f"{data['name']}: {data['kind']}"
    assert tab.locator("#page > section:not([hidden])").count() >= 2


def test_the_map_has_a_cell_per_item_and_is_walked_by_keys(visit, reading):
    tab = visit(reading)
    frame = data_of(reading.page())["tabs"][0].get("frame")
    if frame is None:
        assert tab.locator(".of-map").count() == 0
        return
    rows, columns, join = frame["rows"], frame["columns"], frame.get("join", ".")
    places = frame.get("cells") or [[i, j] for i in range(len(rows)) for j in range(len(columns))]
    keys = [f"{rows[i]}{join}{columns[j]}" for i, j in places]
    assert tab.locator(".of-map .scale").first.inner_text()  # a legend
    field = tab.locator(".of-map canvas, .of-map [data-at][tabindex='0']").first
    if tab.locator(".of-map canvas").count() == 0:
        cells = tab.locator(".of-map .cell[role=gridcell]")
        assert cells.count() == len(rows) * len(columns)
        assert set(tab.locator(".of-map [data-at]").evaluate_all("all => all.map(one => one.dataset.at)")) <= set(keys)
    start = tab.evaluate("state.at")
    row, column = next(place for place, key in zip(places, keys, strict=True) if key == start)
    field.focus()
    key = "ArrowRight" if [row, column + 1] in places else "ArrowLeft"
    tab.keyboard.press(key)
    to = [row, column + (1 if key == "ArrowRight" else -1)]
    if to in places:
        assert tab.evaluate("state.at") == keys[places.index(to)]
        assert tab.evaluate("decodeURIComponent(location.hash.slice(1)).split('?')[0]") == keys[places.index(to)]
        if tab.locator(".of-map canvas").count() == 0:
            assert tab.evaluate("document.activeElement.dataset.at") == keys[places.index(to)]
            assert tab.locator('.of-map [aria-selected="true"]').get_attribute("data-at") == keys[places.index(to)]
    tab.keyboard.press("ArrowLeft" if key == "ArrowRight" else "ArrowRight")
    assert tab.evaluate("state.at") == start


def test_the_address_restores_what_was_chosen(visit, reading):
    data = data_of(reading.page())
    frame = data["tabs"][0].get("frame")
    tab = visit(reading)
    if frame is not None:
        tab.evaluate("choose({ at: frameOf().keys.at(-1), map: current().frame.measures.at(-1).key })")
    elif len(data["tabs"][0].get("state", {})) > 0:
        tab.evaluate("choose({ [Object.keys(current().state)[0]]: 'none' })")
    chosen = tab.evaluate("JSON.stringify({ ...state, open: null })")
    other = visit(reading, tab.evaluate("location.hash"))
    assert json.loads(other.evaluate("JSON.stringify({ ...state, open: null })")) == json.loads(chosen)
    shown = "document.getElementById('page').innerText"
    assert other.evaluate(shown) == tab.evaluate(shown)
    if frame is not None:  # and the way back leads to where the page opened
        tab.go_back()
        assert tab.evaluate("state.at") == (data["tabs"][0]["state"].get("at") or tab.evaluate("frameOf().keys[0]"))
    nonsense = visit(reading, "#nowhere?map=nothing&sort=-nothing&tab=9")
    assert nonsense.locator("#page > section:not([hidden])").count() >= 2


def test_tables_sort_by_every_column(visit, reading):
    tab = visit(reading)
    for summary in tab.locator("summary").all():
        summary.click()
    for index in range(tab.locator("#page table").count()):
        table = tab.locator("#page table").nth(index)
        if table.locator("tbody tr").count() < 2:
            continue
        before = sorted(table.locator("tbody th").all_inner_texts())
        for column in range(min(table.locator("thead button").count(), 4)):
            table.locator("thead button").nth(column).click()
            table = tab.locator("#page table").nth(index)
            direction = table.locator("[aria-sort]").get_attribute("aria-sort")
            texts = [row.split("\t")[column] for row in table.locator("tbody").inner_text().split("\n") if "\t" in row]
            numbers = [number(text) for text in texts]
            known = [value for value in numbers if value is not None]
            if len(known) == len(texts):
                assert known == sorted(known, reverse=direction == "descending")
        if table.locator("tbody tr").count() == len(before):
            assert sorted(table.locator("tbody th").all_inner_texts()) == before


def number(text):
    try:
        return float(text.split(" (")[0].split(",")[0].replace("−", "-").replace(" %", ""))
    except ValueError:
        return None


def test_markup_in_any_text_is_shown_as_text(visit, reading):
    hostile = Reading.load(json.dumps(kinds.spoiled(reading.to_dict())))
    tab = visit(hostile)
    for summary in tab.locator("summary").all():
        summary.click()
    assert "<script>window.hurt" in tab.locator("body").inner_text()
    assert tab.evaluate("window.hurt") is None
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == 2  # its data and its own
    assert EVIL not in hostile.page()
    tab.set_viewport_size({"width": 420, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 420
