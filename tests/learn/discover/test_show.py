"""Causal graphs over columns on the screen, on paper, and from the command line."""

import xml.etree.ElementTree as ET
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli, pages
from keyquery.pages import terminal
from tests.pages.readings import EVIL

run = CliRunner().invoke


@pytest.fixture(scope="module")
def reading():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 300))
    data = np.stack([a, b, a + b + 0.5 * rng.normal(size=300)], 1)
    return kq.discover(data, names=["rain", EVIL, "wet"], bootstrap=4, tiers=[["rain", EVIL], ["wet"]])


def printed(reading):
    console = Console(file=StringIO(), width=200)
    terminal.show(reading, console)
    return console.file.getvalue()


def test_the_page_has_edges_knowledge_and_resamples_and_no_foreign_markup(reading):
    page = pages.page(reading)
    assert "rain o→ wet" in page
    assert "Background knowledge: order: rain, " in page
    assert "adjacent in 4 resamples" in page
    assert EVIL not in page


def test_picture_and_figure(reading, tmp_path):
    svg = pages.picture_bytes(tmp_path / "graph.svg", reading, False)
    nodes = [part for part in ET.fromstring(svg).iter() if part.get("class") == "node"]
    assert len(nodes) == 3
    figure = reading.plot()
    assert len(figure.axes) == 1
    texts = "\n".join(text.get_text() for text in figure.axes[0].texts)
    assert "rain" in texts


def test_the_terminal_lists_edges(reading):
    text = printed(reading)
    assert "rain o→ wet" in text
    assert "100%" in text
    assert "2 tiers" in text
    empty = kq.discover(np.random.default_rng(1).normal(size=(50, 3)), alpha=1e-6)
    assert "No edges" in printed(empty)


def test_the_command(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 300))
    rows = np.stack([a, b, a + b + 0.5 * rng.normal(size=300), rng.integers(0, 2, 300)], 1)
    table = tmp_path / "garden.csv"
    np.savetxt(table, rows, delimiter=",", header="rain,sprinkler,wet,day", comments="")
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), "--csv", str(tmp_path / "a.csv")]
    done = run(
        cli.app,
        ["discover", str(table), "--columns", "rain,wet,day", "--discrete", "day", "--forbid", "wet->rain", *files],
    )
    assert done.exit_code == 0, done.output
    saved = kq.Reading.load(tmp_path / "a.json")
    assert (saved.variables, saved.test, saved.name) == (["rain", "wet", "day"], "mixed", "garden.csv")
    assert saved.edges == [[0, 1, "circle", "arrow"]]
    assert (tmp_path / "a.csv").read_text().splitlines()[1] == "rain,wet,circle,arrow"
    for bad, message in (
        (["--forbid", "wet"], "--forbid takes a pair of columns such as 'age->bp'"),
        (["--columns", "rian,wet"], "did you mean 'rain'"),
        (["--tiers", "rain;dawn"], "a column of tiers must be one of"),
    ):
        refused = run(cli.app, ["discover", str(table), *bad])
        assert refused.exit_code != 0
        assert message in str(refused.exception)
