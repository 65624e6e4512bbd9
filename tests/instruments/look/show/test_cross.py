"""A look at an encoder-decoder on data: cross-attention has a pairwise part instead of symmetric and skew."""

import pytest
import torch

import keyquery as kq
from keyquery.instruments.look.show.shares import BARS, bar_shares
from keyquery.instruments.look.show.triangle import dots
from keyquery.proof.families import tiny_model
from tests.conftest import CHROMIUM
from tests.pages.readings import shown

CROSS = ("pairwise", "popularity", "query_only", "position")


@pytest.fixture(scope="module")
def look():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(3, 60, (40, 8)), "decoder_input_ids": torch.randint(3, 60, (40, 6))}
    return kq.look(tiny_model("bart"), inputs=[inputs], name="tiny bart")


def test_the_terminal_has_a_bar_and_a_legend_of_its_own(look):
    text = shown(look, 120)
    assert "▚ pairwise" in text
    rows = [line for line in text.splitlines() if "cross" in line]
    assert len(rows) == 8
    assert all("▚" in line and "█" not in line and "not on data" not in line for line in rows)


def test_shares_of_a_bar_are_those_of_the_reading(look):
    crossed = [head for head in look.heads if head["kind"] == "cross"]
    for head in crossed:
        shares = dict(zip(BARS, bar_shares(head), strict=True))
        assert shares["symmetric"] == shares["skew"] == 0
        total = max(sum(max(head["on_data"][part], 0) for part in CROSS), 1)
        assert shares["pairwise"] == pytest.approx(max(head["on_data"]["pairwise"], 0) / total)
        assert len(head["on_data"]["intervals"]["pairwise"]) == 2
    assert len(dots(look)) == len(look.heads) - len(crossed)  # the triangle has no place for them


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_draws_the_pairwise_part(visit, look):
    tab = visit(look)
    tab.locator('.cell[data-at="4.1"]').click()
    shares = look.heads[17]["on_data"]
    for name in CROSS:
        text = tab.locator(f'[data-block=parts] [data-bar="{name}"]').text_content()
        assert text.startswith(f"{int(100 * shares[name] + 0.5)} %".replace("-", "−"))
    assert tab.locator('[data-block=parts] [data-bar="skew"]').count() == 0
    tones = "all => all.map(node => getComputedStyle(node).backgroundColor)"
    assert "rgb(130, 80, 223)" in tab.locator("[data-block=parts] .track i").evaluate_all(tones)
    assert "pairwise part instead of symmetric and skew" in tab.locator("#notes").inner_text()
    tab.locator('.cell[data-at="0.1"]').click()
    assert tab.locator('[data-block=parts] [data-bar="skew"]').count() == 1
    assert tab.locator('[data-block=parts] [data-bar="pairwise"]').count() == 0
