"""Flow in the terminal, as a figure, from the command line, and its page in a real browser."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery import pages
from keyquery.instruments.flow.show import depths, views
from tests import vision
from tests.conftest import CHROMIUM
from tests.pages.readings import block_of, data_of, measure_of, shown, unpacked
from tests.processes import refusal, run

LABELS = ["image"] * 6 + ["text"] * 4
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def made(layers=3, heads=2, keep=3, **options):
    generator = torch.Generator().manual_seed(0)
    attention = (2 * torch.randn(layers, heads, 10, 10, generator=generator, dtype=torch.float64)).softmax(-1)
    return attention, kq.flow(attention, LABELS, keep=keep, **options)


def flow_of(data, view="flow"):
    """A view of a page as layers by heads."""
    frame = data["tabs"][0]["frame"]
    return np.array(measure_of(data, view)["values"]).reshape(len(frame["rows"]), len(frame["columns"]))


def test_the_page_holds_the_numbers_of_the_reading():
    attention, reading = made()
    data = data_of(text := pages.page(reading))
    assert "img-src" not in text  # there is no picture in it
    assert "patches are shown by number" in text
    ways = ["image → text", "text → image"]
    names = ["flow", "net of sinks", *ways, "reciprocity"]
    assert [row["key"] for row in data["tabs"][0]["frame"]["measures"]] == names
    assert np.allclose(flow_of(data), reading.corrected, rtol=1e-4)
    assert np.allclose(flow_of(data, "net of sinks"), reading.of("net", corrected=True), rtol=1e-4)
    assert np.allclose(flow_of(data, "reciprocity"), reading.reciprocity, rtol=1e-4)
    assert np.allclose(flow_of(data, ways[0]) + flow_of(data, ways[1]), reading.corrected, atol=1e-5)
    assert np.allclose(block_of(data, "map")["side"]["series"][1]["values"], reading.rollout, rtol=1e-4)
    keys = [f"{row['layer']}.{row['head']}" for row in reading.maps]
    assert block_of(data, "map")["dots"] == keys
    layer, head = map(int, keys[0].split("."))
    item = block_of(data, "detail")["items"][2 * layer + head]
    blocks = {(block["from"], block["to"]): unpacked(block["map"]) for block in item["blocks"][0]["maps"]}
    assert np.allclose(blocks["image", "text"], attention[layer, head, 6:, :6].flatten(), rtol=6e-3)
    assert np.allclose(blocks["text", "image"], attention[layer, head, :6, 6:].flatten(), rtol=6e-3)
    columns = {column["label"]: column["values"] for column in block_of(data, "items")["columns"]}
    assert np.allclose(np.reshape(columns["raw"], (3, 2)), reading.raw, rtol=1e-4)


def test_leading_dimensions_of_any_number_are_displayed():
    for lead in ((), (2,), (3, 2), (3, 4, 2)):
        reading = kq.flow(torch.full((*lead, 4, 4), 0.25), ["a", "a", "b", "b"], keep=1)
        data = data_of(pages.page(reading))
        assert flow_of(data).shape == {0: (1, 1), 1: (1, 2)}.get(len(lead), (3, 2))
        assert len(depths(reading)) == (lead[0] if len(lead) > 1 else 1)
        assert "is cross-modal" in shown(reading)
        assert "reciprocity" not in views(reading)  # nothing varies
    reading = kq.flow([torch.full((4, 4), 0.25)] * 3, ["a", "a", "b", "b"], keep=2)
    assert "attention: 3 layers · 1 head · 2 a tokens" in shown(reading)
    assert len(reading.plot().axes[0].images[0].get_array()) == 3


def test_figures_have_a_map_and_a_curve():
    _, reading = made()
    assert np.allclose(reading.plot(view="reciprocity").axes[0].images[0].get_array(), reading.reciprocity)
    axes = reading.plot().axes
    assert np.allclose(axes[0].images[0].get_array(), 100 * np.array(reading.corrected))
    assert np.allclose(axes[1].lines[2].get_xdata(), 100 * np.array(reading.rollout))
    with pytest.raises(ValueError, match=r"view must be one of 'flow', .*, got 'flaw'"):
        reading.plot(view="flaw")


def test_the_terminal_tells_layers_and_heads():
    _, reading = made()
    text, best = shown(reading), reading.maps[0]
    assert f"{best['layer']}.{best['head']} {100 * best['net_above_chance']:+.1f}" in text
    assert "Heads furthest above chance (net of sinks)" in text
    assert f"{np.mean(reading.raw):.1%} of attention is cross-modal" in text
    above = reading.of("rollout", corrected=True)
    cells = [f"{share:.1%} {100 * more:+.1f}" for share, more in zip(reading.rollout, above, strict=True)]
    assert all(cell in " ".join(text.split()) for cell in cells)
    assert "1 special tokens, excluded" in shown(kq.flow(torch.full((3, 3), 1 / 3), ["a", "special", "b"]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    vision.photograph().save(root / "photograph.png")
    for name in ("vilt", "vit"):
        model, processor = getattr(vision, name)(), getattr(vision, f"{name}_processor")()
        vision.saved(root / name, model, processor)
    return root


@pytest.mark.parametrize("name", ["vilt", "vit"])
def test_the_command_on_an_image(folders, tmp_path, name):
    names = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "html")}
    options = ["--image", str(folders / "photograph.png"), "--picture", str(tmp_path / "out.svg")]
    options += ["--text", vision.TEXT, "--special", "count"] if name == "vilt" else []
    files = [part for kind, path in names.items() for part in (f"--{kind}", str(path))]
    output = run("flow", folders / name, *options, *files)
    reading = kq.Reading.load(names["json"])
    assert len(reading.maps) == 8
    assert reading.counts == ({"special": 3, "text": 6, "image": 20} if name == "vilt" else {"class": 1, "image": 16})
    assert f"{'3 special' if name == 'vilt' else '1 class'} tokens ·" in output
    assert names["csv"].read_text().startswith("layer,head,raw,residual,weighted,net,raw_above_chance")
    text = names["html"].read_text()
    assert "; img-src data:; " in text
    assert "patches are shown by number" not in text
    assert data_of(text)["tabs"][0]["text"]["picture"]["grid"] == ([4, 5] if name == "vilt" else [4, 4])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --text TEXT together"),
        (["--text", "a cat", "--text", "photograph.png"], "--text takes the text itself"),
        (["--text", "a cat", "--image", "none.png"], "image file not found"),
        (["--text", "a", "--image", "photograph.png", "--special", "x"], "--special must be leave or count"),
    ],
)
def test_bad_commands_are_told_in_a_sentence(folders, arguments, sentence):
    given = [folders / part if part.endswith(".png") else part for part in arguments]
    assert sentence in refusal("flow", folders / "vilt", *given)


@pytest.fixture(scope="module")
def seen():
    pytest.importorskip("transformers")
    options = {"text": vision.TEXT, "image": vision.photograph(), "processor": vision.vilt_processor()}
    return kq.flow(vision.vilt(), keep=5, name="tiny vilt", **options)


def lights(tab, kind):
    return [float(part.get_attribute("data-light")) for part in tab.locator(f"[data-{kind}]").all()]


def block(reading, source, target):
    """A map of the strongest head."""
    return np.array(next(b["map"] for b in reading.maps[0]["blocks"] if (b["from"], b["to"]) == (source, target)))


def readout(tab):
    return tab.locator(".of-detail .readout").inner_text()


@browser
def test_patches_are_lit_by_the_words_that_attend_to_them(visit, seen):
    tab = visit(seen)
    best = seen.maps[0]
    assert tab.locator(".of-detail h2").inner_text() == f"Layer {best['layer']}, head {best['head']}"
    assert (tab.locator(".cell[data-at]").count(), tab.locator(".cell.dotted[data-at]").count()) == (8, 5)
    looks = block(seen, "image", "text")  # rows are words
    assert np.allclose(lights(tab, "patch"), looks.mean(0) / looks.mean(0).max(), atol=6e-3)
    assert np.allclose(lights(tab, "token"), looks.sum(1) / looks.sum(1).max(), atol=6e-3)
    tab.locator('[data-token="2"]').click()  # cat
    assert np.allclose(lights(tab, "patch"), looks[1] / looks[1].max(), atol=6e-3)
    assert readout(tab).startswith(f"“cat” attends to “{seen.tokens[9 + looks[1].argmax()]}”")
    tab.locator(".seen").focus()
    tab.keyboard.press("ArrowDown")  # from the first patch
    patch = seen.picture["places"].index([1, 0])
    assert np.allclose(lights(tab, "token"), looks[:, patch] / looks[:, patch].max(), atol=6e-3)
    assert readout(tab).startswith("“patch 2,1” is attended to by")
    whole, (row, column) = tab.locator(".seen").bounding_box(), seen.picture["places"][7]
    box = tab.locator('[data-patch="7"]').bounding_box()
    assert box["x"] - whole["x"] == pytest.approx(column * whole["width"] / 5, abs=1.5)
    assert box["y"] - whole["y"] == pytest.approx(row * whole["height"] / 4, abs=1.5)
    decoded = "const i = new Image(); i.src = document.querySelector('.seen image').getAttribute('href');"
    assert tab.evaluate(f"(async () => {{ {decoded} await i.decode(); return i.width }})()") == 40


@browser
def test_words_are_lit_by_the_patches_that_attend_to_them(visit, seen):
    tab = visit(seen)
    tab.locator(".of-detail").get_by_role("button", name="text → image", exact=True).click()
    looks = block(seen, "text", "image")  # rows are patches
    assert np.allclose(lights(tab, "token"), looks.mean(0) / looks.mean(0).max(), atol=6e-3)
    tab.locator('[data-patch="3"]').click(force=True)
    assert np.allclose(lights(tab, "token"), looks[3] / looks[3].max(), atol=6e-3)
    tab.locator('[data-patch="3"]').click(force=True)  # once more lets go
    assert readout(tab).startswith("On average, a token of image puts")
    kept = {(row["layer"], row["head"]) for row in seen.maps}
    left = next(f"{layer}.{head}" for layer in range(2) for head in range(4) if (layer, head) not in kept)
    tab.locator(f'.cell[data-at="{left}"]').click()
    assert "is not included in this page" in tab.locator(".of-detail").inner_text()


@browser
def test_flow_without_an_image_shows_both_sides_as_words(visit):
    _, reading = made(keep=6, tokens=["x" * 400, *(f"w{number}" for number in range(1, 10))])
    tab = visit(reading)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator("svg.seen").count() == 0
    assert [part.inner_text() for part in tab.locator(".lit").all()][1:] == [f"w{number}" for number in range(1, 10)]
    tab.locator('[data-token="7"]').click()
    looks = block(reading, "image", "text")
    assert np.allclose(lights(tab, "token")[:6], looks[1] / looks[1].max(), atol=6e-3)
    tab.evaluate("choose({ token: '1/99' })")
    assert "On average" in readout(tab)


@browser
def test_popularity_can_be_taken_out(visit):
    """The page computes it from the kept maps; the reading's own method is the reference."""
    pytest.importorskip("transformers")
    reading = kq.flow(vision.vit(), image=vision.photograph(), processor=vision.vit_processor(), keep=3)
    tab = visit(reading)
    assert "between class token and patches" in tab.locator(".lead").inner_text()
    blocks = reading.without_popularity(reading.maps[0]["layer"], reading.maps[0]["head"])
    rest = next(b["map"] for b in blocks if (b["from"], b["to"]) == ("image", "class"))
    tab.get_by_role("button", name="without popularity").click()
    assert np.allclose(lights(tab, "patch"), np.mean(rest, 0) / np.mean(rest, 0).max(), atol=6e-3)
    tab.get_by_role("button", name="attention", exact=True).click()
    tab.get_by_role("button", name="image → image").click()
    tab.locator('.panel:has-text("queries") [data-patch="5"]').click()
    looks = block(reading, "image", "image")[5]
    assert np.allclose(lights(tab.locator('.panel:has-text("keys")'), "patch"), looks / looks.max(), atol=6e-3)
