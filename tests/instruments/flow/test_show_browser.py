"""The page of flow in a real browser: what is lit, what clicks and keys do, and that nothing else happens."""

import numpy as np
import pytest

import keyquery as kq
from tests import vision
from tests.conftest import CHROMIUM
from tests.instruments.flow.test_show import made

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def seen():
    pytest.importorskip("transformers")
    options = {"text": vision.TEXT, "image": vision.photograph(), "processor": vision.vilt_processor()}
    return kq.flow(vision.vilt(), keep=5, name="tiny vilt", **options)


def lights(tab, kind):
    return [float(part.get_attribute("data-light")) for part in tab.locator(f"[data-{kind}]").all()]


def block(reading, index, source, target):
    return np.array(next(b["map"] for b in reading.maps[index]["blocks"] if (b["from"], b["to"]) == (source, target)))


def place_of(reading, index):
    return f"{reading.maps[index]['layer']}.{reading.maps[index]['head']}"


def test_the_strongest_head_is_shown_first_and_its_figures_are_those_of_the_json(visit, seen):
    tab = visit(seen)
    best = seen.maps[0]
    assert tab.locator(".of-detail h2").inner_text() == f"Layer {best['layer']}, head {best['head']}"
    words = tab.locator(".of-detail > p").first.inner_text()
    assert f"raw {seen.raw[best['layer']][best['head']]:.1%}" in words
    above = seen.of("net", corrected=True)[best["layer"]][best["head"]]
    assert above == np.max(seen.of("net", corrected=True))
    assert f"net above chance {100 * above:+.1f} points" in words
    assert "tiny vilt" in tab.locator("#name").inner_text()
    mean, chance = np.mean(seen.raw), np.mean(seen.chance_of("raw"))
    assert tab.locator(".lead").inner_text().startswith(f"{mean:.1%} of attention")
    assert f"{100 * (mean - chance):+z.1f} points" in tab.locator(".lead").inner_text()
    assert tab.locator(".cell[data-at]").count() == 8
    assert tab.locator(".cell.dotted[data-at]").count() == 5


def test_patches_are_lit_by_the_words_that_look_at_them(visit, seen):
    tab = visit(seen)
    looks = block(seen, 0, "image", "text")  # rows are words
    patches = looks.mean(0) / looks.mean(0).max()
    assert np.allclose(lights(tab, "patch"), patches, atol=6e-3)
    words = looks.sum(1) / looks.sum(1).max()
    assert np.allclose(lights(tab, "token"), words, atol=6e-3)
    tab.locator('[data-token="2"]').click()  # cat
    assert np.allclose(lights(tab, "patch"), looks[1] / looks[1].max(), atol=6e-3)
    best = seen.tokens[9 + looks[1].argmax()]
    assert tab.locator(".of-detail .readout").inner_text().startswith(f"“cat” attends to “{best}”")
    tab.locator(".seen").focus()
    tab.keyboard.press("ArrowDown")  # from the first patch
    at = seen.picture["places"].index([1, 0])
    assert np.allclose(lights(tab, "token"), looks[:, at] / looks[:, at].max(), atol=6e-3)
    assert tab.locator(".of-detail .readout").inner_text().startswith("“patch 2,1” is attended to by")
    tab.keyboard.press("ArrowRight")
    assert tab.locator(".of-detail .readout").inner_text().startswith("“patch 2,2” is attended to by")
    assert tab.locator(".spot").count() == 1


def test_patches_lie_where_they_are_in_the_image(visit, seen):
    tab = visit(seen)
    whole = tab.locator(".seen").bounding_box()
    for at in (0, 7, 19):
        row, column = seen.picture["places"][at]
        box = tab.locator(f'[data-patch="{at}"]').bounding_box()
        assert box["x"] - whole["x"] == pytest.approx(column * whole["width"] / 5, abs=1.5)
        assert box["y"] - whole["y"] == pytest.approx(row * whole["height"] / 4, abs=1.5)
    loaded = "document.querySelector('.seen image').getAttribute('href')"
    assert tab.evaluate(loaded).startswith("data:image/jpeg;base64,")
    size = tab.evaluate(
        f"(async () => {{ const i = new Image(); i.src = {loaded}; await i.decode(); return i.width }})()"
    )
    assert size == 40


def test_words_are_lit_by_the_patches_that_look_at_them(visit, seen):
    tab = visit(seen)
    tab.locator(".of-detail").get_by_role("button", name="text → image", exact=True).click()
    looks = block(seen, 0, "text", "image")  # rows are patches
    assert np.allclose(lights(tab, "token"), looks.mean(0) / looks.mean(0).max(), atol=6e-3)
    tab.locator('[data-patch="3"]').click(force=True)
    assert np.allclose(lights(tab, "token"), looks[3] / looks[3].max(), atol=6e-3)
    assert tab.locator(".of-detail .readout").inner_text().startswith(f"“{seen.tokens[12]}” attends to ")
    tab.locator('[data-patch="3"]').click(force=True)  # once more lets go
    assert tab.locator(".of-detail .readout").inner_text().startswith("On average, a token of image puts")


def test_clicks_keys_and_the_address_choose_heads(visit, seen):
    tab = visit(seen, f"#{place_of(seen, 1)}")
    assert tab.locator('[aria-selected="true"]').get_attribute("data-at") == place_of(seen, 1)
    tab.locator('.cell[data-at="1.2"]').click()
    assert tab.locator(".of-detail h2").inner_text() == "Layer 1, head 2"
    assert tab.evaluate("location.hash") == "#1.2"
    for key, place in (("ArrowUp", "0.2"), ("ArrowRight", "0.3"), ("ArrowRight", "0.3"), ("ArrowLeft", "0.2")):
        tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.dataset.at") == place
    tab.get_by_role("button", name="reciprocity").click()
    value = seen.reciprocity[0][2]
    told = f"{value:+.2f}".replace("-", "−")
    assert tab.locator('.cell[data-at="0.2"]').get_attribute("title") == f"0.2: reciprocity {told}"
    left = next(f"{layer}.{head}" for layer in range(2) for head in range(4) if (layer, head) not in kept(seen))
    tab.locator(f'.cell[data-at="{left}"]').click()
    assert "is not included in this page" in tab.locator(".of-detail").inner_text()


def kept(reading):
    return {(one["layer"], one["head"]) for one in reading.maps}


def test_flow_without_an_image_shows_both_sides_as_words(visit):
    _, reading = made(keep=6, tokens=[f"w{place}" for place in range(10)])
    tab = visit(reading)
    assert tab.locator("svg.seen").count() == 0
    assert [part.inner_text() for part in tab.locator(".lit").all()] == [f"w{place}" for place in range(10)]
    tab.locator('[data-token="7"]').click()
    looks = block(reading, 0, "image", "text")
    assert np.allclose(lights(tab, "token")[:6], looks[1] / looks[1].max(), atol=6e-3)


def test_what_a_mask_forbids_is_told(visit):
    pytest.importorskip("transformers")
    options = {"text": vision.TEXT, "image": vision.photograph(), "processor": vision.llava_processor()}
    tab = visit(kq.flow(vision.llava(), keep=2, **options))
    tab.locator(".of-detail").get_by_role("button", name="text → image", exact=True).click()
    assert "the mask does not allow it" in tab.locator(".of-detail .readout").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_both_schemes_and_on_a_telephone(visit, seen, scheme):
    tab = visit(seen, color_scheme=scheme)
    tab.set_viewport_size({"width": 390, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth <= 390")
    luminance = """(node) => {
      const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const of = (colour) => {
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
          .map((v) => (v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4));
        return .2126 * r + .7152 * g + .0722 * b;
      };
      const style = getComputedStyle(node), pair = [of(style.color), of(style.backgroundColor)].sort((a, b) => a - b);
      return (pair[1] + .05) / (pair[0] + .05);
    }"""
    for chip in tab.locator(".lit").all():
        assert chip.evaluate(luminance) > 3


def test_a_token_that_is_not_there_is_not_chosen(visit):
    _, reading = made(keep=6)
    tab = visit(reading)
    for side in (0, 1):
        tab.evaluate(f"choose({{ token: '{side}/99' }})")
        assert tab.locator('.lit[aria-pressed="true"]').count() == 0
        assert "On average" in tab.locator(".of-detail .readout").inner_text()


def test_long_tokens_stay_on_the_page(visit):
    _, reading = made(keep=6, tokens=["x" * 400] * 10)
    tab = visit(reading)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(scope="module")
def plain():
    pytest.importorskip("transformers")
    return kq.flow(vision.vit(), image=vision.photograph(), processor=vision.vit_processor(), keep=3, name="tiny vit")


@pytest.mark.parametrize("kind", ["seen", "plain"])
def test_popularity_can_be_taken_out(visit, request, kind):
    """The page computes it from the kept maps; the reading's own method is the reference."""
    reading = request.getfixturevalue(kind)
    tab = visit(reading)
    query = "text" if kind == "seen" else "class"
    place = reading.maps[0]["layer"], reading.maps[0]["head"]
    rest = next(b for b in reading.without_popularity(*place) if (b["from"], b["to"]) == ("image", query))
    without, whole = np.array(rest["map"]).mean(0), block(reading, 0, "image", query).mean(0)
    assert np.allclose(lights(tab, "patch"), whole / whole.max(), atol=6e-3)
    tab.get_by_role("button", name="without popularity").click()
    assert np.allclose(lights(tab, "patch"), without / without.max(), atol=6e-3)
    tab.get_by_role("button", name="attention", exact=True).click()
    assert np.allclose(lights(tab, "patch"), whole / whole.max(), atol=6e-3)


def test_a_patch_of_a_vit_shows_what_it_attends_to(visit, plain):
    tab = visit(plain)
    tab.get_by_role("button", name="image → image").click()
    tab.locator('.panel:has-text("queries") [data-patch="5"]').click()
    looks = block(plain, 0, "image", "image")[5]
    assert np.allclose(lights(tab.locator('.panel:has-text("keys")'), "patch"), looks / looks.max(), atol=6e-3)
    assert "between class token and patches" in tab.locator(".lead").inner_text()
