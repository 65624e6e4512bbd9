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
from keyquery.listening import attention_maps
from keyquery.pages.notebook import frame
from keyquery.report.look.shares import bar_shares
from tests.report.conftest import CHROMIUM
from tests.report.readings import EVIL, tiny

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def looks():
    pytest.importorskip("transformers")
    return {name: tiny(name) for name in ("llama", "bert")}


def title(tab):
    return tab.locator("#chosen h2").inner_text()


def figure(tab, name):
    return tab.locator(f'[data-figure="{name}"]').inner_text()


def written(value):
    """A signed figure as the page writes it."""
    text = f"{value:+z.2f}".replace("-", "−")
    return "0.00" if text == "+0.00" else text


def whole(share):
    """A share in percent, as JavaScript rounds it."""
    return str(math.floor(100 * share + 0.5)).replace("-", "−")


def three(text):
    return float(text.replace("−", "-"))


def test_a_click_reaches_a_head_and_its_figures_are_those_of_the_json(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading)
    assert tab.locator("#name").inner_text() == "tiny llama"
    tab.locator('.cell[data-head="1.2"]').click()
    assert title(tab) == "Layer 1, head 2"
    assert tab.evaluate("location.hash") == "#1.2"
    head = next(one for one in reading.heads if (one["layer"], one["head"]) == (1, 2))
    for view in ("raw", "folded", "on_data"):
        assert figure(tab, f"{view}.symmetry") == written(head[view]["symmetry"])
    for name in ("effective_rank", "stable_rank", "symmetric_energy", "positive_share"):
        assert three(figure(tab, f"raw.{name}")) == float(f"{head['raw'][name]:.3g}")
    for part in (*PARTS, "interaction"):
        low, high = (float(f"{end:.3g}") for end in head["on_data"]["intervals"][part])
        told = f"{whole(head['on_data'][part])} % ({whole(low)} to {whole(high)})"
        assert tab.locator(f'[data-share="{part}"]').text_content() == told
    assert head["label"] in tab.locator(".headline").inner_text()
    assert head["reason"] in tab.locator(".headline").inner_text()
    assert tab.locator(".head.chosen").get_attribute("data-head") == "1.2"
    assert tab.locator("svg.spectrum").count() == 3
    assert tab.locator("path.curve").count() == 2


def test_the_same_summary_and_window_stand_on_top(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading)
    assert tab.locator("#summary .tag").all_inner_texts() == [f"{n}{label}" for label, n in reading.summary.items()]
    for place in ("#facts", "#map .scale", "#triangles", "#chosen figure >> nth=0"):
        assert "9-token windows, 3 sequences" in tab.locator(place).text_content()


def test_the_map_shows_the_parts_of_every_head(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading)
    for head in reading.heads:
        cell = tab.locator(f'.cell[data-head="{head["layer"]}.{head["head"]}"]')
        widths = cell.locator("span").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        shares = bar_shares(head)
        assert [width / cell.bounding_box()["width"] for width in widths] == pytest.approx(shares, abs=0.01)


def test_what_changes_with_the_window_is_marked(visit, looks):
    reading = looks["llama"][2]
    changed = {**reading.heads[0]["on_data"], "changes_with_window": ["symmetry", "label"]}
    heads = [{**reading.heads[0], "on_data": changed}, *reading.heads[1:]]
    tab = visit(dataclasses.replace(reading, heads=heads), "#0.0")
    titles = [mark.get_attribute("title") for mark in tab.locator("#chosen .window").all()]
    half = written(changed["half_window"]["symmetry"])
    said = "differs in the first half of each window"
    assert titles == [f"label: {said}", f"symmetry: {said}: {half}"]
    heads = [{**head, "on_data": {**head["on_data"], "changes_with_window": []}} for head in reading.heads]
    assert visit(dataclasses.replace(reading, heads=heads), "#0.0").locator("#chosen .window").count() == 0


def test_shares_are_drawn_over_the_length_of_the_window(visit, looks):
    reading = looks["llama"][2]
    shares = {name: reading.heads[0]["on_data"][name] for name in (*PARTS, "interaction", "symmetry", "intervals")}
    lengths = [{"length": length, **shares} for length in (4, 8)]
    tab = visit(dataclasses.replace(reading, heads=[{**head, "lengths": lengths} for head in reading.heads]), "#0.0")
    assert tab.locator(".lengths path.curve").count() == len(PARTS) + 1  # and symmetry
    axes = tab.locator(".lengths text").all_text_contents()
    assert [axes.count(length) for length in ("4", "8", "9")] == [2, 2, 2]  # 9 is the window of the look


def test_the_loss_without_parts_stands_below_them(visit, looks):
    reading = looks["llama"][2]
    lost = {"zero": [1, 0.9, 1.1], "symmetric": [0.05, 0.01, 0.09], "skew": [-0.002, -0.01, 0.006]}
    lost |= {"popularity": [0.5, 0.4, 0.6]}
    heads = [{**head, "ablation": lost} if head["layer"] == 1 else head for head in reading.heads]
    tab = visit(dataclasses.replace(reading, heads=heads), "#1.0")
    assert tab.locator("[data-off]").evaluate_all("all => all.map(one => one.dataset.off)") == [*list(lost)[1:], "zero"]
    assert tab.locator('[data-off="symmetric"]').text_content() == "+0.05 (0.01 to 0.09)"
    assert tab.locator('[data-off="skew"]').text_content() == "−0.002 (−0.01 to 0.006)"
    assert tab.locator("circle.unsure").count() == 1  # its interval holds 0
    assert tab.locator("circle.popularity").count() == 1
    tab.locator('.cell[data-head="0.0"]').click()
    assert tab.locator("[data-off]").count() == 0
    tab.locator("#table summary").click()
    assert "loss, popularity ablated" in tab.locator("#table thead").inner_text()


def test_keys_walk_over_the_map(visit, looks):
    tab = visit(looks["bert"][2])
    tab.locator('.cell[data-head="0.0"]').focus()
    for key, place in (
        ("ArrowRight", "0.1"),
        ("ArrowDown", "1.1"),
        ("ArrowLeft", "1.0"),
        ("ArrowLeft", "1.0"),
        ("ArrowUp", "0.0"),
    ):
        tab.keyboard.press(key)
        assert tab.evaluate("location.hash") == f"#{place}"
        assert tab.evaluate("document.activeElement.dataset.head") == place
        assert tab.locator('[aria-selected="true"]').get_attribute("data-head") == place
    assert title(tab) == "Layer 0, head 0"
    tab.locator('.cell[data-head="1.2"]').click()
    tab.keyboard.press("ArrowRight")  # a click holds the keyboard too
    assert title(tab) == "Layer 1, head 3"
    tab.get_by_role("button", name="folded", exact=True).press("Enter")
    assert tab.evaluate("document.activeElement.textContent") == "folded"


def test_the_address_names_the_head_both_ways(visit, looks):
    tab = visit(looks["bert"][2], "#1.3")
    assert title(tab) == "Layer 1, head 3"
    tab.evaluate("location.hash = '#0.2'")
    tab.locator("#chosen h2", has_text="Layer 0, head 2").wait_for()
    tab.evaluate("location.hash = '#1'")
    tab.locator("#chosen h2", has_text=re.compile("^Layer 1$")).wait_for()
    for nonsense in ("#99.0", "#x", "#m7:0.0"):
        tab.evaluate(f"location.hash = '{nonsense}'")
    tab.locator("#triangles .head").first.click(force=True)
    assert title(tab).startswith("Layer 0, head")


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_attention_on_the_screen_is_that_of_the_model(visit, looks, name):
    model, batch, reading = looks[name]
    n = len(reading.sample["tokens"])
    expected = attention_maps(model, {key: value[:1, :n] for key, value in batch.items()})[1][0, 3]
    scores = next(one["scores"] for one in reading.heads if (one["layer"], one["head"]) == (1, 3))
    tab = visit(reading, "#1.3")
    picture = tab.locator(".maps svg").first
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
    assert tab.locator(".maps svg").count() == 6


def test_markup_in_tokens_and_names_is_shown_as_text(visit):
    _, _, reading = tiny("bert", name=EVIL)
    tab = visit(reading)
    assert tab.locator("#name").inner_text() == EVIL
    assert EVIL in tab.locator(".readout .token").all_inner_texts()
    assert tab.evaluate("window.hurt") is None
    assert tab.locator("img").count() == 0
    tab.evaluate("document.getElementById('table').open = true")
    tab.wait_for_selector("#table table")
    assert tab.evaluate("window.hurt") is None


def test_views_change_the_map(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading, "#0.0")
    for view, name in (("raw", "raw"), ("folded", "folded"), ("on_data", "on data")):
        tab.get_by_role("button", name=name, exact=True).click()
        label = tab.locator('.cell[data-head="1.1"]').get_attribute("aria-label")
        head = next(one for one in reading.heads if (one["layer"], one["head"]) == (1, 1))
        assert f"symmetry {written(head[view]['symmetry'])}" in label


def test_a_layer_has_a_view(visit, looks):
    reading = looks["bert"][2]
    tab = visit(reading)
    tab.get_by_role("button", name="layer 1", exact=True).click()
    assert (title(tab), tab.evaluate("location.hash")) == ("Layer 1", "#1")
    assert figure(tab, "layer.symmetry") == written(reading.layers[1]["raw"]["symmetry"])
    tab.get_by_role("button", name="head 2", exact=True).click()
    assert title(tab) == "Layer 1, head 2"


def test_the_table_has_every_head_and_figure(visit, looks):
    reading = looks["bert"][2]
    tab = visit(reading)
    tab.locator("#table summary").click()
    tab.wait_for_selector("#table table")
    rows = [line.split("\t") for line in tab.locator("#table tbody").inner_text().splitlines()]
    names = tab.locator("#table thead").inner_text().split("\t")
    assert len(rows) == len(reading.heads)
    for row, head in zip(rows, reading.heads, strict=True):
        assert row[0] == f"{head['layer']}.{head['head']}"
        assert row[names.index("raw symmetry")] == written(head["raw"]["symmetry"])
        assert three(row[names.index("folded stable rank")]) == float(f"{head['folded']['stable_rank']:.3g}")
        assert three(row[names.index("on data popularity")]) == float(f"{head['on_data']['popularity']:.3g}")


def test_figures_are_copied_as_csv(visit, looks):
    reading = looks["llama"][2]
    tab = visit(reading, "#1.0", permissions=["clipboard-read", "clipboard-write"])
    head = next(one for one in reading.heads if (one["layer"], one["head"]) == (1, 0))
    titles = [button.get_attribute("aria-label") for button in tab.locator(".copy").all()]
    assert len(titles) == tab.locator("figure").count() + 3  # and those of triangle, map and layers

    def copied(name):
        button = tab.get_by_role("button", name=f"copy CSV: {name}", exact=True)
        button.click()
        button.filter(has_text="copied").wait_for()
        return list(csv.reader(io.StringIO(tab.evaluate("navigator.clipboard.readText()"))))

    shares = {part: [float(value) for value in values] for part, *values in copied("Parts of the scores")[1:]}
    for part, (share, *ends) in shares.items():
        assert share == pytest.approx(head["on_data"][part])
        assert ends == pytest.approx(head["on_data"]["intervals"][part], rel=5.1e-3)
    values = [float(value) for _, value in copied("Spectrum of S")[1:]]
    assert values == [float(f"{value:.3g}") for value in head["raw"]["eigenvalues"]]
    pairs = copied("Skew planes")[1:]
    assert [pair[1:] for pair in pairs] == [pair for relation in head["relations"] for pair in relation["pairs"]]


def test_two_models_stand_side_by_side(visit, looks):
    both = kq.compare(looks["llama"][2], looks["bert"][2])
    tab = visit(both, "#m1:1.2")
    assert (tab.locator("#name").inner_text(), title(tab)) == ("tiny bert", "Layer 1, head 2")
    assert tab.locator("#triangles > svg").count() == 2
    tab.get_by_role("button", name="tiny llama", exact=True).click()
    assert (tab.locator("#name").inner_text(), tab.evaluate("location.hash")) == ("tiny llama", "#m0:1.2")
    boxes = [triangle.bounding_box() for triangle in tab.locator("#triangles > svg").all()]
    assert boxes[0]["y"] == boxes[1]["y"]


def brightness(tab):
    red, green, blue = map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])
    return (red + green + blue) / 3


def test_light_and_dark(visit, looks):
    assert brightness(visit(looks["bert"][2], color_scheme="light")) > 240
    tab = visit(looks["bert"][2], color_scheme="dark")
    assert brightness(tab) < 30
    ink = tab.evaluate("getComputedStyle(document.querySelector('.triangle .corner')).fill")
    assert sum(map(int, re.findall(r"\d+", ink)[:3])) > 300


def test_narrow_and_wide_pages_do_not_scroll_sideways(visit, looks):
    both, weights = kq.compare(looks["llama"][2], looks["bert"][2]), kq.look(torch.nn.MultiheadAttention(8, 2))
    for reading, place in ((both, "#m0:1.1"), (looks["bert"][2], "#1"), (weights, "")):
        tab = visit(reading, place)
        tab.evaluate("document.getElementById('table').open = true")
        tab.wait_for_selector("#table table")
        for width in (400, 900, 1600):
            tab.set_viewport_size({"width": width, "height": 800})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_a_notebooks_frame_draws_itself(visit, looks):
    tab = visit(None, html=f"<!doctype html><body>{frame(looks['bert'][2])}</body>")
    inside = tab.frame_locator("iframe")
    inside.locator('.cell[data-head="1.1"]').click()
    assert inside.locator("#chosen h2").inner_text() == "Layer 1, head 1"


def test_a_token_of_a_causal_graph_picks_out_its_edges(visit):
    attention = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0.3, 0.3, 0.4, 0], [0, 0, 0, 1.0]])
    seen = visit(kq.causes(attention.expand(2, 4, 4), tokens=["one", "two", EVIL, "four"]))
    assert seen.locator("svg.graph[role] .edge").count() == 6
    seen.click(".word[data-node='0']")
    assert seen.locator("#together .edge.on").count() == 1
    assert seen.locator("#together .node.on").count() == 2
    seen.click(".word[data-node='0']")
    seen.mouse.move(0, 0)
    assert seen.locator(".picked").count() == 0
    assert EVIL in seen.locator(".word[data-node='2']").inner_text()
    assert seen.evaluate("window.hurt") is None
    assert seen.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_lists_before_and_after_are_joined_and_their_images_load(visit):
    images = torch.arange(12 * 25, dtype=torch.uint8).view(12, 5, 5).numpy()
    database = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    model = kq.KReciprocalReranker(top=10, neighbours=6, device="cpu")
    reading = model.moves(database[:2], database, images=images, query_images=images[:2], names=[EVIL] * 12, most=5)
    tab = visit(reading)
    assert tab.locator(".card").count() == 20
    loaded = tab.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert loaded == [5] * 22
    middles = """[...document.querySelectorAll(".query")].map(query => {
      const left = query.querySelector("svg").getBoundingClientRect().left;
      const cards = [...query.querySelectorAll(".before .card")].map(card => card.getBoundingClientRect());
      return [cards.map(box => (box.left + box.right) / 2 - left), [...query.querySelectorAll("line")].map(
        line => +line.getAttribute("x1"))];
    })"""
    for cards, lines in tab.evaluate(middles):
        assert all(min(abs(card - line) for line in lines) < 1 for card in cards)
    assert tab.evaluate("window.hurt") is None


def test_what_differs_is_a_map_that_leads_to_heads(visit):
    torch.manual_seed(0)
    one = kq.Encoder(16, depth=2, heads=2)
    other = kq.Encoder(16, depth=2, heads=2)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        other.blocks[1].attention.key.weight[8:] += 0.1
    both = kq.compare(one, other)
    tab = visit(both)
    cells = tab.locator("#changes [data-moved]")
    assert cells.count() == 4
    shades = [cell.evaluate("cell => cell.style.getPropertyValue('--amount')") for cell in cells.all()]
    assert shades == ["0%", "0%", "0%", "100%"]
    assert tab.locator("#changes tbody tr").count() == 1
    tab.locator('[data-moved="1.1"]').click()
    assert tab.evaluate("location.hash") == "#m1:1.1"
    assert title(tab) == "Layer 1, head 1"
    assert "No head differs" in visit(kq.compare(one, one)).locator("#changes").inner_text()
    assert not visit(kq.look(one)).locator("#changes").is_visible()


def test_the_layers_of_several_stacks_have_labels(visit):
    from keyquery.testing.families import tiny_model

    tab = visit(kq.look(tiny_model("t5")), "#4.1")
    assert title(tab) == "Layer 4 (cross 0), head 1"
    assert tab.locator('#map [data-head="2.1"]').get_attribute("aria-label").startswith("layer 2 (decoder 0), head 1")


def test_paper_keeps_the_colours_of_maps_bars_and_legends(visit):
    # In a page with a script and in one without; on paper backgrounds are left out where a page does not ask for them.
    readings = (tiny("gpt2")[2], kq.causes(torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]])))
    for reading in readings:
        tab = visit(reading)
        tab.emulate_media(media="print")
        wanted = "[...document.querySelectorAll('*')].map((node) => getComputedStyle(node).printColorAdjust)"
        assert set(tab.evaluate(wanted)) == {"exact"}
