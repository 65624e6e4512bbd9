"""The page of a path in a real browser: what moves, what is drawn over it, and that figures are those of the JSON."""

import csv
import io

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.pages.document import page
from tests.conftest import CHROMIUM
from tests.pages.readings import EVIL

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def reading():
    """An attention layer whose weights wander, and ten instances of two classes on their way."""
    torch.manual_seed(0)
    layer, x = kq.Attention(8, 2), torch.randn(10, 3, 8)
    lens = kq.TransportLens(layer, inputs=x, labels=[EVIL, "plain"] * 5, name=EVIL)
    for _ in range(3):
        for parameter in layer.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        lens.step()
    return lens.reading()


def ends(tab, lines, x, y):
    """The coordinates of all elements of a kind."""
    script = "(all, names) => all.map(element => names.map(name => element.getAttribute(name)))"
    return np.array(tab.locator(lines).evaluate_all(script, [x, y]), dtype=float)


def drawn(tab):
    """Centres of the dots."""
    return ends(tab, ".cloud .dot", "cx", "cy")


def three(value):
    return f"{value:.3g}"


def test_the_slider_moves_the_cloud_as_the_path_did(visit, reading):
    tab = visit(reading)
    assert tab.locator(".cloud .dot").count() == 30
    frames = np.array(reading.sketch["frames"]).reshape(4, 30, 2)
    order = np.argsort(reading.sketch["classes"], kind="stable")  # points are drawn class by class
    shown = []
    for record in range(4):
        tab.locator(".time input").fill(str(record))
        assert tab.locator(".time output").inner_text() == f"epoch {record}"
        shown.append(drawn(tab))
    moved, went = np.array(shown), frames[:, order]
    scale = np.ptp(moved[..., 0]) / np.ptp(went[..., 0])
    flipped = went * np.array([scale, -scale])  # up is down on a screen
    np.testing.assert_allclose(moved - moved[0, 0], flipped - flipped[0, 0], atol=0.2)


def test_figures_are_those_of_the_reading_at_every_step(visit, reading):
    tab = visit(reading)
    lead = tab.locator(".lead").inner_text()
    assert all(three(getattr(reading, name)) in lead for name in ("distance", "wasserstein", "optimality"))
    for name, label in (("random", "random matching"), ("efficiency", "efficiency")):
        assert tab.locator(f'[data-tag="{label}"] b').inner_text() == three(getattr(reading, name))
    tab.locator(".time input").fill("2")
    assert f"distance T {three(reading.curves['distance'][2])}" in tab.locator(".of-cloud .readout").inner_text()
    tab.locator(".time input").fill("0")
    assert "optimality –" in tab.locator(".of-cloud .readout").inner_text()
    cells = tab.locator(".of-table tbody tr").nth(1).locator("td").all_inner_texts()
    assert cells[:4] == [three(reading.classes[0][name]) for name in ("points", "distance", "wasserstein", "random")]


def test_the_coupling_leads_to_places_of_the_end_and_ways_are_drawn_instead(visit, reading):
    tab = visit(reading)
    rounded = [{tuple(point) for point in points.round(0)} for points in (ends(tab, ".best", "x2", "y2"), drawn(tab))]
    assert rounded[0] == rounded[1]
    assert tab.locator(".best").first.is_visible()
    assert not tab.locator(".own").first.is_visible()
    tab.get_by_role("button", name="trajectory").click()
    assert not tab.locator(".best").first.is_visible()
    way = tab.locator(".own").first.get_attribute("d")
    assert way.count("L") == 4  # three steps, and where it is
    tab.get_by_role("button", name="none").click()
    assert tab.locator(".own").first.is_visible() is tab.locator(".best").first.is_visible() is False


def test_classes_can_be_left_out_and_names_are_texts(visit, reading):
    tab = visit(reading)
    assert tab.locator("h1").inner_text() == EVIL
    tab.locator('.of-cloud .legend button[data-class="0"]').click()
    assert not tab.locator('g[data-class="0"] .dot').first.is_visible()
    assert tab.locator('g[data-class="1"] .dot').first.is_visible()
    tab.locator('.of-cloud .legend button[data-class="0"]').click()
    assert tab.locator('g[data-class="0"] .dot').first.is_visible()
    assert tab.evaluate("window.hurt") is None


def test_curves_are_drawn_and_copied(visit, reading):
    tab = visit(reading, permissions=["clipboard-read", "clipboard-write"])
    assert tab.locator(".of-steps figure").count() == 2

    def copied(name):
        button = tab.get_by_role("button", name=f"copy CSV: {name}", exact=True)
        button.click()
        button.filter(has_text="copied").wait_for()
        return list(csv.reader(io.StringIO(tab.evaluate("navigator.clipboard.readText()"))))

    far = copied("Distance")
    assert far[0][:3] == ["epoch", "name", "value"]
    distances = [float(row[2]) for row in far[1:] if row[1] == "distance T"]
    assert distances == pytest.approx(reading.curves["distance"], rel=1e-4)
    tab.locator(".of-steps svg").first.click(position={"x": 60, "y": 60})
    assert tab.locator(".time output").inner_text() == "epoch 0"


def test_paths_of_one_dimension_one_class_and_one_step_draw(visit):
    tab = visit(kq.transport(torch.rand(2, 5, 1)))
    assert tab.locator(".cloud .dot").count() == 5
    assert tab.locator(".of-cloud .legend button").count() == tab.locator(".of-steps path.thin").count() == 0
    still = kq.transport(torch.zeros(3, 4, 2))  # nothing moves, and all stand in one place
    assert visit(still).locator(".lead").inner_text().endswith("optimality –.")
    assert "default-src 'none'" in page(still)
    assert "http" not in page(still).replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
