"""Attributions and wirings as they are shown: the sentence, the tables, the figures and the pages."""

from __future__ import annotations

import re

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.pages.terminal import show
from tests.conftest import CHROMIUM
from tests.instruments.attribution.test_paths import IDS, circuit
from tests.pages.readings import EVIL, Evil, data_of

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def attribution():
    options = {"inputs": {"input_ids": IDS}, "head": "1.0", "query": 8, "depth": 2, "name": "circuit"}
    return kq.attribute(circuit(), **options, tokenizer=Evil())


@pytest.fixture(scope="module")
def wiring():
    torch.manual_seed(0)
    halves = [torch.randperm(8)[:6] for _ in range(12)]
    ids = torch.stack([torch.cat((half, half)) for half in halves])
    return kq.wiring(circuit(), inputs={"input_ids": ids}, name="circuit", tokenizer=Evil())


def printed(reading):
    console = Console(width=100, record=True, file=None, quiet=False, markup=False)
    with console.capture() as captured:
        show(reading, console)
    return captured.get()


def test_the_sentence_names_the_token_that_was_moved(attribution):
    words = " ".join(printed(attribution).split())
    assert "0.0 wrote into the key 3 ' word6'" in words
    assert words.startswith("1.0 attends from 8 ' word4' to 3 ' word6' (attention")
    assert "because of 0.0 in the key, which read most from 2 ' word4'" in words


def test_the_wiring_names_the_head_that_feeds_another(wiring):
    words = " ".join(printed(wiring).split())
    assert re.match(r"1\.0 reads its keys from 0\.0: 100% of its score variance, against \d+% with its tokens", words)


def test_a_query_that_sees_one_key_is_explained_by_that():
    reading = kq.attribute(circuit(), inputs={"input_ids": IDS}, head="1.0", query=0)
    assert " ".join(printed(reading).split()) == (
        "1.0 attends from 0 '#3' to 0 '#3' because it sees no other key: every source is relative 0"
    )


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
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.exception
    assert re.search(r"1\.2 (attends|hardly attends|scores) from 9", " ".join(done.output.split()))
    assert kq.Reading.load(tmp_path / "a.json").query == 9
    short = ["wiring", "--tokens", "24", "--length", "12", "--device", "cpu", "--json", str(tmp_path / "w.json")]
    done = CliRunner().invoke(cli.app, short)
    assert done.exit_code == 0, done.exception
    assert len(kq.Reading.load(tmp_path / "w.json").heads) == 16


def test_a_key_that_is_scored_below_the_mean_is_not_explained_as_a_look():
    reading = kq.attribute(kq.models.DECODER, text=kq.models.LONG_TEXT, head="1.2", query=20, key=5, length=32)
    assert sum(map(sum, reading.table["relative"])) < 0
    assert "below the mean key; the largest source is" in " ".join(printed(reading).split())
