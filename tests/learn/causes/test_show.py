"""Causal graphs on the screen, on paper, and from the command line."""

import json
import math
import xml.etree.ElementTree as ET
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli, pages
from keyquery.learn.causes.causes import Causes
from keyquery.learn.causes.show import page as graph_page
from keyquery.learn.causes.show import ring, svg
from keyquery.learn.discovery.show import written
from keyquery.pages import terminal
from keyquery.pages.rings import KINDS, kind_of, tips
from tests.conftest import CHROMIUM
from tests.pages.readings import block_of, data_of

run = CliRunner().invoke
TEXT = "The captain of the ship was happy to see the land again."


def made(edges, count=6, heads=1, tokens=None, **more):
    """A reading with these edges in every head."""
    graph = {"layer": 2, "tests": 7, "tests_by_size": [7], "rounds": 1, "done": True, "edges": edges}
    settings = {"method": "icd", "alpha": 0.01, "samples": 768.0, "provenance": {"samples": "given"}, **more}
    return Causes(
        model={"name": "made"},
        tokens=tokens or [f"word{i}" for i in range(count)],
        nodes=list(range(count)),
        graphs=[{**graph, "head": head} for head in range(heads)],
        **settings,
    )


EVERY = [
    (0, 1, "tail", "arrow"),
    (1, 2, "circle", "arrow"),
    (2, 3, "arrow", "arrow"),
    (3, 4, "circle", "circle"),
    (4, 5, "tail", "tail"),
]


@pytest.fixture(scope="module")
def decoder():
    return kq.causes(kq.models.DECODER, text=TEXT)


def elements(text, name):
    found = (part for part in ET.fromstring(text).iter() if name in part.get("class", "").split())
    return list(found)


def test_every_kind_of_edge_is_drawn_with_its_marks():
    drawn = elements(svg(made(EVERY)), "edge")
    drawn = {(part.get("data-i"), part.get("data-j")): part for part in drawn if part.get("data-i") != "-1"}
    assert len(drawn) == len(EVERY)
    for i, j, *marks in EVERY:
        part = drawn[str(i), str(j)]
        heads = [child for child in part if child.get("class") == "head"]
        circles = [child for child in part if child.tag.endswith("circle")]
        assert (len(heads), len(circles)) == (marks.count("arrow"), marks.count("circle"))
    kinds = {part.get("class") for part in drawn.values()}
    assert len(kinds) == 5


def test_marks_stand_at_their_own_end():
    panel = ring(made(EVERY))
    for arc in panel.arcs:
        for tip, node, other in zip(tips(arc), (arc.i, arc.j), (arc.j, arc.i), strict=True):
            far = [math.dist(tip.stop, panel.places[end][:2]) for end in (node, other)]
            assert far[0] < 16 < far[1]


def test_edges_in_words_point_forwards():
    reading = made(EVERY)
    assert [written(reading.tokens, edge) for edge in EVERY] == [
        "word0 → word1",
        "word1 o→ word2",
        "word2 ↔ word3",
        "word3 o–o word4",
        "word4 – word5",
    ]
    assert written(reading.tokens, (0, 1, "arrow", "tail")) == "word1 → word0"
    assert {kind_of(*marks) for marks in KINDS} == {"→", "o→", "↔", "o–o", "–"}


def test_figures_have_a_panel_for_the_consensus_and_each_head(decoder):
    titles = [axis.get_title().split("\n")[0] for axis in decoder.plot().axes if axis.get_title()]
    assert titles == ["consensus of 4 heads", *(f"layer 3, head {head}" for head in range(4))]
    assert len(decoder.plot(head=2).axes) == 1
    assert len(elements(svg(decoder), "title")) == 6
    with pytest.raises(ValueError, match="head must be one of 0, 1, 2, 3, got 9"):
        decoder.plot(head=9)


def test_one_token_and_no_edge_draw():
    reading = kq.causes(torch.ones(1, 1))
    assert "<svg" in svg(reading)
    assert "No edge" in pages.page(reading)
    reading.plot()


def shown(reading):
    text = StringIO()
    terminal.show(reading, Console(file=text, width=120))
    return text.getvalue()


def test_the_terminal_tells_edges_heads_and_explanations():
    edges = shown(made(EVERY, heads=3, tokens=["[b]a", "b", "c", "d", "e", "f"]))
    assert "[b]a → b" in edges
    assert "3 of 3" in edges
    assert "latent confounder" in edges
    assert "No edge" in shown(kq.causes(torch.eye(3)))
    unchanged = kq.explain(kq.causes(torch.full((3, 3), 1 / 3)), 0, lambda masked, target: False)
    assert "None of the tested sets of up to 4 tokens changes 0:0" in shown(unchanged)
    assert "1 head, 1 token\n" in shown(kq.causes(torch.eye(1)))


SENTENCES = [
    ({"sets": [[1, 2]], "calls": 3, "pool": [1, 2]}, "0:word0 depends on: 1:word1 + 2:word2 (3 model queries)."),
    (
        {"sets": [], "calls": 0, "pool": [2, 1]},
        "Connected to 0:word0, nearest first: 2:word2 1:word1. The model has no LM head to test predictions.",
    ),
    ({"sets": [], "calls": 0, "pool": []}, "No token is connected to 0:word0: there is no set to mask."),
    (
        {"sets": [[1]], "calls": 3, "pool": [1], "replaced": "<ship>"},
        "0:word0 (predicted; the text has <ship>) depends on: 1:word1 (3 model queries).",
    ),
]


@pytest.mark.parametrize(("explanation", "sentence"), SENTENCES)
def test_explanations_in_sentences(explanation, sentence):
    reading = made(EVERY, explanation={"target": 0, "largest": 3, **explanation})
    assert sentence in shown(reading)
    assert block_of(data_of(graph_page(reading)), "summary")["sentences"] == [sentence]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_click_on_a_token_shows_its_edges_until_the_next(visit):
    tab = visit(made(EVERY, heads=2))
    tab.locator('.word[data-node="1"]').click()
    assert tab.locator("#page svg.graph.picked").count() == 3  # the consensus and both heads
    assert tab.locator("#page svg.graph[role] >> nth=0").locator(".edge.on").count() == 2
    assert tab.locator('.word[aria-pressed="true"]').get_attribute("data-node") == "1"
    tab.locator('.word[data-node="1"]').click()
    tab.mouse.move(1, 1)
    assert tab.locator("svg.graph.picked").count() == 0


def test_the_command_writes_all_it_is_asked_for(tmp_path):
    names = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    files = [part for name, path in names.items() for part in (f"--{name}", str(path))]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["causes", str(kq.models.ENCODER), "--text", str(text), "--target", "6", "--heads", "0,2", "--nodes", "9"]
    result = run(cli.app, [*command, *files, "--picture", str(tmp_path / "out.svg")])
    assert result.exit_code == 0, result.output
    reading = kq.Reading.load(names["json"])
    assert [graph["head"] for graph in reading.graphs] == [0, 2]
    assert len(reading.nodes) == 9
    assert reading.explanation["target"] == 6
    assert reading.explanation["calls"] > 0
    assert json.loads(names["json"].read_text())["kind"] == "causes"
    assert names["csv"].read_text().startswith("layer,head,i,j,token_i,token_j,mark_i,mark_j\n")
    assert "<!doctype html>" in names["html"].read_text()


def test_the_command_on_words_in_quotes():
    result = run(cli.app, ["causes", str(kq.models.DECODER), TEXT, "--layer", "1", "--heads", "1", "--samples", "64"])
    assert result.exit_code == 0, result.output
    assert "decoder, layer 1: 1 head, 13 tokens" in result.output
    assert "64 samples (given)" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give either the text in quotes or --text FILE"),
        ([TEXT, "--target", "13"], "--target must be a position from 0 to 12, got 13"),
        ([TEXT, "--heads", "a"], "--heads takes numbers below 100000 and ranges such as 0-5 or 0,3,7, got 'a'"),
        (["ship " * 300], "the text has 301 tokens, and LanguageModel takes at most 256"),
        ([TEXT, "--target", "0"], "a decoder does not predict the first token"),
    ],
)
def test_bad_commands_are_told_in_a_sentence(arguments, sentence):
    result = run(cli.app, ["causes", str(kq.models.DECODER), *arguments])
    assert isinstance(result.exception, (ValueError, TypeError))
    assert sentence in str(result.exception)
