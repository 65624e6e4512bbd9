"""Re-ranked lists as a page, a picture and in the terminal."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

import keyquery as kq
from keyquery.pages import picture_bytes, terminal
from keyquery.pages.document import page
from tests.conftest import CHROMIUM
from tests.pages.readings import EVIL


@pytest.fixture(scope="module")
def reading():
    generator = torch.Generator().manual_seed(0)
    database = torch.randn(30, 6, generator=generator)
    names = [EVIL if place % 2 else f"item {place} {{{{style}}}}" for place in range(30)]
    shown = {"names": names, "query_names": [EVIL, "two"], "relevant": [[1, 2, 3], []]}
    model = kq.KReciprocalReranker(top=20, neighbours=8, device="cpu")
    return model.moves(torch.randn(2, 6, generator=generator), database, most=7, **shown)


def shown(reading):
    out = io.StringIO()
    terminal.show(reading, Console(width=100, file=out))
    return out.getvalue()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_marks_what_moved(visit, reading):
    tab = visit(reading)
    assert tab.locator("li.card").count() == 2 * 2 * 7
    expected = []
    for one in reading.queries:
        items = {item["item"]: item for item in one["items"]}
        for item in one["after"]:
            by = items[item]["before"] - items[item]["after"]
            expected.append("" if by == 0 else f"{'▲' if by > 0 else '▼'}{abs(by)}")
    assert tab.locator("ol.after .rank span").all_inner_texts() == expected
    assert any(mark.startswith("▲") for mark in expected)
    assert tab.locator("li.card.right").count() == sum(
        item in (1, 2, 3) for side in ("before", "after") for item in reading.queries[0][side]
    )
    assert f"{reading.queries[0]['precision']['before']:.3f} →" in tab.locator(".ranking").first.inner_text()
    lines = tab.locator(".slopes line").evaluate_all(
        "all => all.map(one => ['class', 'x1', 'x2'].map(name => one.getAttribute(name)))"
    )
    assert len(lines) == sum(len(one["items"]) for one in reading.queries)
    assert all((kind == "stays") == (a == b and int(a) < 7 * 92) for kind, a, b in lines)
    assert tab.evaluate("window.hurt") is None


def test_what_was_not_in_the_list_came_from_below():
    database = torch.tensor([[1.0, 0.2], [1.0, -0.3], [0.9, 0.45]])
    model = kq.AlphaQueryExpansion(top=2, neighbours=1, alpha=0.0, device="cpu")
    reading = model.moves([[1.0, 0.0]], database)
    assert (reading.queries[0]["before"], reading.queries[0]["after"]) == ([0, 1], [0, 2])
    items = {item["item"]: item for item in reading.queries[0]["items"]}
    assert (items[2]["before"], items[1]["after"], items[1]["score"]) == (None, None, None)
    assert [row["moved"] for row in reading.records()] == [0, None, None]
    assert "▲" in page(reading)
    assert "below" in shown(reading)
    assert picture_bytes(kq.models.TEXT.with_suffix(".png"), reading)[:4] == b"\x89PNG"


def test_the_terminal_shows_places_and_marks(reading):
    text = shown(reading)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("rank  was  moved") == 2
    assert f"average precision {reading.queries[0]['precision']['before']:.3f} →" in text
    assert "1 queries, 1 without relevant items excluded" in shown(kq.score_rankings([[0, 1], [1, 0]], [[1], []]))


def test_the_picture_has_a_line_an_item_and_its_images(reading):
    figure = reading.plot(query=1)
    assert len(figure.axes[0].lines) == len(reading.queries[1]["items"])
    with pytest.raises(ValueError, match="query must be between 0 and 1, got 2"):
        reading.plot(query=2)
    images = np.arange(30, dtype=np.uint8)[:, None, None] * np.ones((1, 3, 3), np.uint8)
    shown = kq.AffinityReranker(8, 4, "cpu").moves(torch.eye(30)[:1], torch.eye(30), images=images, most=4)
    assert len(shown.plot().axes[0].artists) == 8


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_lists_before_and_after_are_joined_and_their_images_load(visit):
    images = torch.arange(12 * 25, dtype=torch.uint8).view(12, 5, 5).numpy()
    database = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    model = kq.KReciprocalReranker(top=10, neighbours=6, device="cpu")
    reading = model.moves(database[:2], database, images=images, query_images=images[:2], names=[EVIL] * 12, most=5)
    tab = visit(reading)
    assert tab.locator(".card").count() == 20
    loaded = tab.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert loaded == [5] * 22
    middles = """[...document.querySelectorAll(".ranking")].map(query => {
      const left = query.querySelector("svg").getBoundingClientRect().left;
      const cards = [...query.querySelectorAll(".before .card")].map(card => card.getBoundingClientRect());
      return [cards.map(box => (box.left + box.right) / 2 - left), [...query.querySelectorAll("line")].map(
        line => +line.getAttribute("x1"))];
    })"""
    for cards, lines in tab.evaluate(middles):
        assert all(min(abs(card - line) for line in lines) < 1 for card in cards)
    assert tab.evaluate("window.hurt") is None
