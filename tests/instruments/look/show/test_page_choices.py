"""The page in a real browser: the table sorts, the map takes the colours of any figure, and Back takes a step back."""

import dataclasses
import math
import re

import pytest

from tests.conftest import CHROMIUM
from tests.instruments.look.show.test_browser import three, title
from tests.pages.readings import tiny

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def look():
    """A look with figures that the page has never heard of, one of them with an interval, and what a part costs."""
    pytest.importorskip("transformers")
    reading = tiny("llama")[2]
    heads = []
    for i, head in enumerate(reading.heads):
        new = {"query_only": 0.1 + i / 50, 'odd "name" é': (-1) ** i * i, "note": "no number"}
        on_data = {**head["on_data"], **new, "intervals": {"query_only": [i / 60, 0.2 + i / 50]}}
        off = {"ablation": {"popularity": [i / 10 - 0.2, i / 10 - 0.3, i / 10]}} if i % 3 else {}
        heads.append({**head, "on_data": on_data, **off})
    return dataclasses.replace(reading, heads=heads)


def value_of(head, key):
    part, _, name = key.partition(".")
    if part == "off":
        return head.get("ablation", {}).get(name, [None])[0]
    return (head[part] or {}).get(name)


def options(tab):
    return tab.locator(".of-map option").evaluate_all("all => all.map(one => one.value)")


# Every figure is chosen, and what then stands there is told, in one call: each call would draw the page.
CHOOSE_EACH = """() => [...document.querySelectorAll('.of-map option')].map(one => one.value).map(key => {
    const select = document.querySelector('.of-map select');
    select.value = key;
    select.dispatchEvent(new Event('input', {bubbles: true}));
    select.dispatchEvent(new Event('change', {bubbles: true}));
    if (document.querySelector('.of-map select').value !== key) throw new Error(key);
    const end = document.querySelector('.of-map').getBoundingClientRect().right + 1;
    const parts = [...document.querySelectorAll('.of-map .scale > *, .of-map select')];
    const inside = parts.every(one => one.getBoundingClientRect().right <= end);
    const cells = [...document.querySelectorAll('.cell[data-at]:not(.empty)')].map(one => [one.dataset.at,
        parseFloat(one.style.getPropertyValue('--amount')), one.style.getPropertyValue('--tone')]);
    const ends = document.querySelector('.ends-of')?.getAttribute('aria-label');
    return {key, cells, ends, inside, width: document.documentElement.scrollWidth};
})"""


def test_any_figure_of_the_reading_colours_the_map(visit, look):
    tab = visit(look)
    found = options(tab)
    assert {"raw.symmetry", "folded.stable_rank", "on_data.popularity", "on_data.query_only", "off.popularity"} <= {
        *found
    }
    assert not [key for key in found if re.search(r"eigenvalues|note|intervals", key)]
    shown = [each for each in tab.evaluate(CHOOSE_EACH) if each["key"] not in ("parts", "cost")]
    for each in shown:
        key = each["key"]
        values = {f"{h['layer']}.{h['head']}": value_of(h, key) for h in look.heads if value_of(h, key) is not None}
        shown = {place: (amount, tone) for place, amount, tone in each["cells"]}  # how strong, in which of two colours
        assert shown.keys() == values.keys(), key
        negative = {tone for place, (_, tone) in shown.items() if values[place] < 0}
        positive = {tone for place, (_, tone) in shown.items() if values[place] > 0}
        assert not negative & positive, key
        for tone in negative | positive:  # within a colour, more is stronger
            some = sorted((abs(values[p]), amount) for p, (amount, own) in shown.items() if own == tone and values[p])
            assert [amount for _, amount in some] == sorted(amount for _, amount in some), key
        low, high = (share(end) for end in each["ends"][5:].split(" to "))
        slack = 0.005 if each["ends"].endswith("%") else 0.0
        assert low <= min(values.values()) + 0.005 * abs(min(values.values())) + slack, key
        assert high >= max(values.values()) - 0.005 * abs(max(values.values())) - slack, key


def share(text):
    """An end of a scale, which may be in percent."""
    return three(text.removesuffix(" %")) / 100 if text.endswith(" %") else three(text.replace("+", ""))


def test_back_and_forward_walk_over_what_was_chosen(visit, look):
    tab = visit(look)
    first = title(tab)
    start = tab.locator(".of-map select").input_value()
    tab.locator('.cell[data-at="1.2"]').click()
    tab.locator(".of-map select").select_option("raw.stable_rank")
    tab.locator(".of-map").get_by_role("button", name="symmetry folded", exact=True).click()
    tab.get_by_role("button", name="layer 0", exact=True).click()
    assert tab.evaluate("location.hash") == "#0?map=folded.symmetry"
    steps = [("Layer 1, head 2", "folded.symmetry"), ("Layer 1, head 2", "raw.stable_rank")]
    for words, key in [*steps, ("Layer 1, head 2", start), (first, start)]:
        tab.go_back()
        tab.locator(".of-detail h2", has_text=words).wait_for()
        assert tab.locator(".of-map select").input_value() == key
    assert tab.evaluate("location.hash") == ""
    tab.go_forward()
    tab.locator(".of-detail h2", has_text="Layer 1, head 2").wait_for()


def rows(tab):
    return tab.locator("#table tbody tr").evaluate_all("all => all.map(one => one.dataset.item)")


CLICK_EACH = """keys => keys.map(key => [key, ...[1, 2].map(() => {
    document.querySelector(`[data-focus="${CSS.escape('sort ' + key)}"]`).click();
    const rows = [...document.querySelectorAll('#table tbody tr')].map(one => one.dataset.item);
    return [rows, [...document.querySelectorAll('th[aria-sort]')].map(one => one.getAttribute('aria-sort'))];
})])"""


def test_every_column_sorts_both_ways(visit, look):
    tab = visit(look)
    tab.locator("#table summary").click()
    places = [f"{head['layer']}.{head['head']}" for head in look.heads]
    assert rows(tab) == places
    for key, *sorts in tab.evaluate(
        CLICK_EACH, [key for key in options(tab) if key not in ("parts", "cost")]
    ):  # in one call: each would draw the page
        values = [value_of(head, key) for head in look.heads]
        for (found, said), down in zip(sorts, (True, False), strict=True):
            way = -1 if down else 1
            order = sorted(
                range(len(places)),
                key=lambda i: (values[i] is None, 0 if values[i] is None else way * short(values[i])),
            )
            assert found == [places[i] for i in order], (key, down)
            assert said == ["descending" if down else "ascending"]
    tab.get_by_role("button", name="label", exact=True).click()
    words = tab.locator('#table [data-cell="label"]').all_inner_texts()
    assert words == sorted(words, key=lambda text: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", text)])
    tab.get_by_role("button", name="head", exact=True).click()
    assert rows(tab) == places


def short(value):
    """As the page carries it."""
    return float(f"{value:.5g}") if math.isfinite(value) else value


def test_a_row_shows_its_head(visit, look):
    tab = visit(look, "#0.0?sort=-raw.symmetry")  # which opens the table
    most = max(look.heads, key=lambda head: head["raw"]["symmetry"])
    assert rows(tab)[0] == f"{most['layer']}.{most['head']}"
    tab.locator("#table tbody tr").nth(3).locator("td").nth(2).click()
    place = rows(tab)[3]
    assert tab.evaluate("location.hash") == f"#{place}?sort=-raw.symmetry"
    assert title(tab) == f"Layer {place[0]}, head {place[2]}"
    assert tab.locator('#table tr[aria-selected="true"]').get_attribute("data-item") == place
    tab.locator(f'tr[data-item="{rows(tab)[5]}"] button').press("Enter")  # and by the keyboard
    assert tab.locator('#table tr[aria-selected="true"]').get_attribute("data-item") == rows(tab)[5]
    assert tab.evaluate("document.activeElement.textContent") == rows(tab)[5]
    tab.locator('.cell[data-at="1.1"]').click()
    assert tab.locator('#table tr[aria-selected="true"]').get_attribute("data-item") == "1.1"
