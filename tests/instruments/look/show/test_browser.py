"""The page in a real browser: what is on the screen, what clicks and keys do, and that nothing else happens."""

import csv
import dataclasses
import io
import math
import re

import pytest
import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.show.shares import bar_shares
from keyquery.listening import attention_maps
from keyquery.pages.notebook import frame
from tests.conftest import CHROMIUM
from tests.pages.readings import tiny

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def looks():
    pytest.importorskip("transformers")
    return {name: tiny(name) for name in ("llama", "bert")}


def title(tab):
    return tab.locator(".of-detail h2").inner_text()


def figure(tab, name):
    """A metric of the selected head, such as raw.stable_rank."""
    view, metric = name.split(".")
    row = tab.locator("[data-block=metrics] tbody tr").filter(
        has=tab.get_by_role("rowheader", name=metric.replace("_", " "), exact=True)
    )
    return row.locator(f'[data-cell="{view}"]').inner_text()


def written(value):
    """A signed figure as the page writes it."""
    text = f"{value:+z.2f}".replace("-", "−")
    return "0.00" if text == "+0.00" else text


def whole(share):
    """A share in percent, as JavaScript's toFixed rounds it: halves away from 0."""
    size = math.floor(abs(100 * share) + 0.5)
    return f"−{size}" if share < 0 and size else str(size)


def three(text):
    return float(text.replace("−", "-"))


def test_a_click_reaches_a_head_and_its_figures_are_those_of_the_json(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading)
    assert tab.locator("#name").inner_text() == "tiny llama"
    tab.locator('.cell[data-at="1.2"]').click()
    assert title(tab) == "Layer 1, head 2"
    assert tab.evaluate("location.hash") == "#1.2"
    head = next(one for one in reading.heads if (one["layer"], one["head"]) == (1, 2))
    for view in ("raw", "folded", "on_data"):
        assert figure(tab, f"{view}.symmetry").split(" (")[0] == written(head[view]["symmetry"])
    for name in ("effective_rank", "stable_rank", "symmetric_energy", "positive_share"):
        assert three(figure(tab, f"raw.{name}")) == float(f"{head['raw'][name]:.3g}")
    for part in (*PARTS, "interaction"):
        low, high = (float(f"{end:.3g}") for end in head["on_data"]["intervals"][part])
        told = f"{whole(head['on_data'][part])} % ({whole(low)} to {whole(high)})"
        assert tab.locator(f'[data-block=parts] [data-bar="{part}"]').text_content() == told
    assert head["label"] in tab.locator(".headline").inner_text()
    assert head["reason"] in tab.locator(".of-detail").inner_text()
    assert tab.locator(".head.chosen").get_attribute("data-head") == "1.2"
    assert tab.locator("svg.spectrum").count() == 3
    assert tab.locator("[data-block=offsets] path.line").count() == 2
    assert tab.locator(".tags .tag").all_inner_texts() == [f"{n}{label}" for label, n in reading.summary.items()]
    for place in ("#facts", ".of-map .scale", ".triangle", "[data-block=parts]"):
        assert "9-token windows, 3 sequences" in tab.locator(place).text_content()
    tab.get_by_role("button", name="layer 1", exact=True).click()
    assert (title(tab), tab.evaluate("location.hash")) == ("Layer 1", "#1")
    row = tab.locator(".of-detail tbody tr").first.inner_text().split("\t")
    assert row == ["symmetry", written(reading.layers[1]["raw"]["symmetry"])]


def test_the_map_shows_the_parts_of_every_head(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading)
    for head in reading.heads:
        cell = tab.locator(f'.cell[data-at="{head["layer"]}.{head["head"]}"]')
        widths = cell.locator("i").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        shares = bar_shares(head)[: len(PARTS)]
        assert [width / cell.bounding_box()["width"] for width in widths] == pytest.approx(shares, abs=0.01)


def test_the_costs_of_parts_lead_the_page_and_stand_below_the_shares(visit, looks):
    reading = looks["llama"][2]
    lost = {"zero": [1, 0.9, 1.1], "symmetric": [0.05, 0.01, 0.09], "skew": [-0.002, -0.01, 0.006]}
    lost |= {"popularity": [0.5, 0.4, 0.6]}
    heads = [{**head, "ablation": lost} if head["layer"] == 1 else head for head in reading.heads]
    tab = visit(dataclasses.replace(reading, heads=heads))
    assert tab.evaluate("[state.at[0], state.map]") == ["1", "cost"]
    assert tab.locator(".lead").inner_text().startswith("Costliest heads: 1.0: +1 nats per token; 1.1: ")
    rows = tab.locator("[data-block=ablation] [data-bar]")
    names = rows.evaluate_all("all => all.map(one => one.dataset.bar)")
    assert names == ["symmetric", "skew", "popularity", "head to 0"]
    texts = dict(zip(names, rows.all_inner_texts(), strict=True))
    assert texts["symmetric"] == "+0.05 (+0.01 to +0.09)"
    assert texts["skew"] == "−0.002 (−0.01 to +0.006)"
    assert tab.locator("[data-block=ablation] em.hollow").count() == 1  # its interval holds 0
    tab.locator(".of-map select").select_option("off.skew")
    assert tab.locator(".cell.hatch[data-at]").count() == len(heads) / 2
    tab.locator('.of-map [data-focus="cell"][data-at="1.1"]').click()
    assert rows.count() == 4
    tab.evaluate("choose({ at: '0.0' })")
    assert rows.count() == 0
    tab.locator("#table summary").click()
    assert "loss, popularity ablated" in tab.locator("#table thead").inner_text()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_attention_on_the_screen_is_that_of_the_model(visit, looks, name):
    model, batch, reading = looks[name]
    n = len(reading.sample["tokens"])
    expected = attention_maps(model, {key: value[:1, :n] for key, value in batch.items()})[1][0, 3]
    scores = next(one["scores"] for one in reading.heads if (one["layer"], one["head"]) == (1, 3))
    tab = visit(reading, "#1.3")
    picture = tab.locator(".maps canvas").first
    picture.focus()
    place = [1, 0]  # where the read-out begins
    steps = {"ArrowDown": (1, 0), "ArrowRight": (0, 1), "ArrowLeft": (0, -1)}
    for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 3 + ["ArrowDown", "ArrowLeft"]:
        tab.keyboard.press(key)
        place = [place[0] + steps[key][0], place[1] + steps[key][1]]
        shown = three(tab.locator('[data-part="attention"]').inner_text().removesuffix(" %"))
        assert shown == pytest.approx(100 * float(expected[tuple(place)]), abs=2.0)
        for part in PARTS:
            rows = [torch.tensor(row[: i + 1] if name == "llama" else row) for i, row in enumerate(scores[part])]
            centred = [row - row.mean() for row in rows]
            value = float(centred[place[0]][place[1]])
            size = max(float(row.abs().max()) for row in centred) / 127 + 1e-6  # a step of what the page carries
            assert three(tab.locator(f'[data-part="{part}"]').inner_text()) == pytest.approx(value, abs=size)
    assert tab.locator(".maps canvas").count() == 6


def test_figures_are_copied_as_csv(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading, "#1.0", permissions=["clipboard-read", "clipboard-write"])
    head = next(one for one in reading.heads if (one["layer"], one["head"]) == (1, 0))

    def copied(name):
        button = tab.get_by_role("button", name=f"copy CSV: {name}", exact=True)
        button.click()
        button.filter(has_text="copied").wait_for()
        return list(csv.reader(io.StringIO(tab.evaluate("navigator.clipboard.readText()"))))

    shares = {part: [float(value) for value in values[:3]] for part, *values in copied("Parts of the scores")[1:]}
    for part, (share, *ends) in shares.items():
        assert share == pytest.approx(head["on_data"][part], rel=1e-4, abs=1e-9)
        assert ends == pytest.approx(head["on_data"]["intervals"][part], rel=5.1e-3)
    values = [float(value) for _, value in copied("Spectrum of S")[1:]]
    assert values == [float(f"{value:.3g}") for value in head["raw"]["eigenvalues"]]
    pairs = copied("Skew planes")[1:]
    assert [pair[1:] for pair in pairs] == [pair for relation in head["relations"] for pair in relation["pairs"]]


def test_two_models_stand_side_by_side_and_the_page_opens_on_what_differs(visit, looks):
    both = kq.compare(looks["llama"][2], looks["bert"][2])
    tab = visit(both)
    assert tab.locator("#name").inner_text() == "tiny llama and tiny bert"
    assert tab.locator("#facts").inner_text() == "tiny bert minus tiny llama"
    shift = {
        f"{h['layer']}.{h['head']}": o["raw"]["symmetry"] - h["raw"]["symmetry"]
        for h, o in zip(*(look.heads for look in both.looks), strict=True)
    }
    tab.locator(".of-map select").select_option("raw.symmetry")
    label = tab.locator('.cell[data-at="1.2"]').get_attribute("title")
    assert label.startswith(f"1.2: difference of raw symmetry {written(shift['1.2'])}")
    assert tab.locator(".triangle:visible").count() == 2
    boxes = [triangle.bounding_box() for triangle in tab.locator(".triangle:visible").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    tab.locator('.cell[data-at="1.2"]').click()
    tab.get_by_role("button", name="tiny bert", exact=True).click()
    assert (tab.evaluate("state.tab"), title(tab)) == (2, "Layer 1, head 2")
    assert visit(both, tab.evaluate("location.hash")).locator(".triangle:visible").count() == 1


def test_a_notebooks_frame_draws_itself(visit, looks):
    tab = visit(None, html=f"<!doctype html><body>{frame(looks['bert'][2])}</body>")
    inside = tab.frame_locator("iframe")
    inside.locator('.cell[data-at="1.1"]').click()
    assert inside.locator(".of-detail h2").inner_text() == "Layer 1, head 1"


def test_what_differs_is_a_map_that_opens_on_the_head_that_moved(visit):
    torch.manual_seed(0)
    one = kq.Encoder(16, depth=2, heads=2)
    other = kq.Encoder(16, depth=2, heads=2)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        other.blocks[1].attention.key.weight[8:] += 0.1
    tab = visit(kq.compare(one, other))
    cells = tab.locator(".of-map .cell[data-at]")
    shades = [cell.evaluate("cell => cell.style.getPropertyValue('--amount')") for cell in cells.all()]
    assert shades == ["0%", "0%", "0%", "100%"]
    assert tab.locator(".lead").inner_text().startswith("1 of 4 heads differ, 1.1 most (")
    assert title(tab) == "Layer 1, head 1"
    assert "No head differs" in visit(kq.compare(one, one)).locator(".lead").inner_text()


def test_paper_keeps_the_colours_of_maps_bars_and_legends(visit):
    # In a page with a script and in one without; on paper backgrounds are left out where a page does not ask for them.
    readings = (tiny("gpt2")[2], kq.causes(torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]])))
    for reading in readings:
        tab = visit(reading)
        tab.emulate_media(media="print")
        wanted = "[...document.querySelectorAll('*')].map((node) => getComputedStyle(node).printColorAdjust)"
        assert set(tab.evaluate(wanted)) == {"exact"}


# Every figure is chosen, and what then stands there is told, in one call: each call would draw the page.
CHOOSE_EACH = """() => [...document.querySelectorAll('.of-map option')].map(one => one.value).map(key => {
    const select = document.querySelector('.of-map select');
    select.value = key;
    select.dispatchEvent(new Event('input', {bubbles: true}));
    select.dispatchEvent(new Event('change', {bubbles: true}));
    const cells = [...document.querySelectorAll('.cell[data-at]:not(.empty)')].map(one => [one.dataset.at,
        parseFloat(one.style.getPropertyValue('--amount')), one.style.getPropertyValue('--tone')]);
    return {key, cells};
})"""


def test_any_figure_of_the_reading_colours_the_map(visit, looks):
    """Also one that the page has never heard of."""
    reading = looks["llama"][2]
    heads = [
        {**head, "on_data": {**head["on_data"], 'odd "name" é': (-1) ** i * i, "note": "no number"}}
        for i, head in enumerate(reading.heads)
    ]
    shown = visit(dataclasses.replace(reading, heads=heads)).evaluate(CHOOSE_EACH)
    views = [one for one in shown if one["key"].split(".")[0] in ("raw", "folded", "on_data")]
    keys = {one["key"] for one in views}
    assert {"raw.symmetry", "folded.stable_rank", "on_data.popularity", 'on_data.odd "name" é'} <= keys
    assert not [key for key in keys if re.search(r"eigenvalues|note|intervals", key)]
    for one in views:
        view, _, name = one["key"].partition(".")
        values = {f"{head['layer']}.{head['head']}": head[view][name] for head in heads}
        cells = {place: (amount, tone) for place, amount, tone in one["cells"]}  # how strong, in which of two colours
        assert cells.keys() == values.keys(), name
        negative = {tone for place, (_, tone) in cells.items() if values[place] < 0}
        positive = {tone for place, (_, tone) in cells.items() if values[place] > 0}
        assert not negative & positive, name
        for tone in negative | positive:  # within a colour, more is stronger
            some = sorted((abs(values[p]), amount) for p, (amount, own) in cells.items() if own == tone and values[p])
            assert [amount for _, amount in some] == sorted(amount for _, amount in some), name


def test_a_row_shows_its_head(visit, looks):
    tab = visit(looks["llama"][2], "#0.0?sort=-raw.symmetry")  # which opens the table
    rows = tab.locator("#table tbody tr").evaluate_all("all => all.map(one => one.dataset.item)")
    order = sorted(looks["llama"][2].heads, key=lambda head: -head["raw"]["symmetry"])
    assert rows == [f"{head['layer']}.{head['head']}" for head in order]
    selected = tab.locator('#table tr[aria-selected="true"]')
    tab.locator("#table tbody tr").nth(3).locator("td").nth(2).click()
    assert tab.evaluate("location.hash") == f"#{rows[3]}?sort=-raw.symmetry"
    assert title(tab) == f"Layer {rows[3][0]}, head {rows[3][2]}"
    assert selected.get_attribute("data-item") == rows[3]
    tab.locator(f'tr[data-item="{rows[5]}"] button').press("Enter")  # and by the keyboard
    assert selected.get_attribute("data-item") == rows[5] == tab.evaluate("document.activeElement.textContent")
    tab.locator('.cell[data-at="1.1"]').click()
    assert selected.get_attribute("data-item") == "1.1"
