"""Attributions and wirings as they are shown: the sentence, the tables, the figures and the pages."""

from __future__ import annotations

import re

import pytest

import keyquery as kq
from tests.conftest import CHROMIUM
from tests.instruments.attribution.circuit import IDS, built, repeated_halves
from tests.pages.readings import EVIL, Evil, data_of, shown
from tests.processes import run

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def attribution():
    options = {"inputs": {"input_ids": IDS}, "head": "1.0", "query": 8, "depth": 2, "name": "circuit"}
    return kq.attribute(built(), **options, tokenizer=Evil())


@pytest.fixture(scope="module")
def wiring():
    return kq.wiring(built(), inputs={"input_ids": repeated_halves()}, name="circuit", tokenizer=Evil())


def words_of(reading):
    return " ".join(shown(reading).split())


def test_sentences_name_the_token_that_was_moved_and_the_head_that_feeds_another(attribution, wiring):
    words = words_of(attribution)
    assert "0.0 wrote into the key 3 ' word6'" in words
    assert words.startswith("1.0 attends from 8 ' word4' to 3 ' word6' (attention")
    assert "because of 0.0 in the key, which read most from 2 ' word4'" in words
    fed = r"1\.0 reads its keys from 0\.0: 100% of its score variance, against \d+% with its tokens"
    assert re.match(fed, words_of(wiring))


def test_other_sentences():
    alone = kq.attribute(built(), inputs={"input_ids": IDS}, head="1.0", query=0)
    words = "1.0 attends from 0 '#3' to 0 '#3' because it sees no other key: every source is relative 0"
    assert words_of(alone) == words
    below = kq.attribute(kq.models.DECODER, text=kq.models.LONG_TEXT, head="1.2", query=20, key=5, length=32)
    assert sum(map(sum, below.table["relative"])) < 0
    assert "below the mean key; the largest source is" in words_of(below)


def test_figures_show_the_largest_sources(attribution, wiring):
    pytest.importorskip("matplotlib")
    axis = attribution.plot().axes[0]
    assert axis.get_xticklabels()[0].get_text() == "0.0"
    assert axis.get_yticklabels()[0].get_text() == "token embedding"
    values = wiring.plot().axes[0].images[0].get_array()
    assert values.max() == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="side must be one of"):
        wiring.plot(side="value")


def test_tables_of_the_page_add_up(attribution):
    page = attribution.page()
    tabs = data_of(page)["tabs"]
    assert {tab["name"].replace(" ", "_") for tab in tabs} == set(attribution.table)
    for tab in tabs:
        total = sum(map(sum, attribution.table[tab["name"].replace(" ", "_")]))
        assert sum(tab["frame"]["measures"][0]["values"]) == pytest.approx(total, rel=1e-2, abs=1e-3)
    assert EVIL not in page
    assert "<iframe" in attribution._repr_html_()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_click_on_a_cell_shows_its_examples(visit, wiring):
    tab = visit(wiring)
    readout = tab.locator(".of-map .readout")
    assert readout.inner_text().startswith("0.0/1.0: key side 100 % (")
    assert tab.locator(".strip").count() == 3
    pair = next(row for row in wiring.examples if row["head"] == "1.0" and row["side"] == "key")["pairs"][0]
    assert f"from {pair['query']} to {pair['key']}" in tab.locator(".strip").first.inner_text()
    box = tab.locator("canvas").bounding_box()
    tab.mouse.click(box["x"] + 5, box["y"] + 2)  # the first head, the first source
    first = tab.locator('[data-axis="0"] option').first.inner_text()
    assert readout.inner_text().startswith(f"{first}/0.0: key side ")
    tab.locator("canvas").press("ArrowRight")
    assert readout.inner_text().startswith(f"{first}/1.0: key side ")
    tab.get_by_role("button", name="query side").click()
    assert readout.inner_text().startswith(f"{first}/1.0: query side ")
    shares = {row["source"]: row["share"] for row in wiring.of("1.0", "query")}
    row = tab.locator(f'.of-sources tr[data-item="{first}/1.0"]').first.inner_text()
    assert f"{100 * shares[first]:.0f} %" in row.replace("−", "-")
    assert tab.evaluate("window.hurt") is None


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_of_a_pair_switches_views(visit, attribution):
    tab = visit(attribution)
    assert "which read most from 2" in tab.locator(".lead").inner_text()
    assert tab.locator(".strip .query").get_attribute("title") == "8, query"
    tab.get_by_role("button", name="raw", exact=True).click()
    values = tab.locator(".cell[data-at]").all_inner_texts()
    total = sum(float(value.replace("−", "-")) for value in values)
    assert total == pytest.approx(attribution.score, abs=0.01 * len(values))
    assert tab.evaluate("window.hurt") is None


def test_commands_run_on_the_bundled_model(tmp_path):
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--html", str(tmp_path / "a.html")]
    words = ["attribute", "--head", "1.2", "--query", "9", "--length", "12", "--device", "cpu", *files]
    assert re.search(r"1\.2 (attends|hardly attends|scores) from 9", " ".join(run(*words).split()))
    assert kq.Reading.load(tmp_path / "a.json").query == 9
    run("wiring", "--tokens", "24", "--length", "12", "--device", "cpu", "--json", tmp_path / "w.json")
    assert len(kq.Reading.load(tmp_path / "w.json").heads) == 16
