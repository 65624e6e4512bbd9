"""Flow on the screen, on paper, and from the command line."""

import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli, pages
from keyquery.instruments.flow.show import depths, grid, views
from keyquery.pages import terminal
from tests import vision
from tests.pages.readings import EVIL, block_of, data_of, measure_of, unpacked

run = CliRunner().invoke
LABELS = ["image"] * 6 + ["text"] * 4
WAYS = ("image → text", "text → image")


def made(layers=3, heads=2, keep=3, **options):
    generator = torch.Generator().manual_seed(0)
    attention = (2 * torch.randn(layers, heads, 10, 10, generator=generator, dtype=torch.float64)).softmax(-1)
    return attention, kq.flow(attention, LABELS, keep=keep, **options)


def shown(reading):
    text = StringIO()
    terminal.show(reading, Console(file=text, width=100))
    return text.getvalue()


def flow_of(data, view="flow"):
    """A view of a page as layers by heads."""
    frame = data["tabs"][0]["frame"]
    return np.array(measure_of(data, view)["values"]).reshape(len(frame["rows"]), len(frame["columns"]))


def test_the_page_holds_the_figures_of_the_reading():
    attention, reading = made(values=torch.rand(3, 2, 10, 4, dtype=torch.float64))
    data = data_of(pages.page(reading))
    names = [one["key"] for one in data["tabs"][0]["frame"]["measures"]]
    assert names == ["flow", "net of sinks", *WAYS, "norm-weighted", "reciprocity"]
    assert np.allclose(flow_of(data), reading.corrected, rtol=1e-4)
    assert np.allclose(flow_of(data, "net of sinks"), reading.of("net", corrected=True), rtol=1e-4)
    assert np.allclose(flow_of(data, "norm-weighted"), reading.of("weighted", corrected=True), rtol=1e-4)
    assert np.allclose(flow_of(data, WAYS[0]) + flow_of(data, WAYS[1]), reading.corrected, atol=1e-5)
    series = block_of(data, "map")["side"]["series"]
    assert np.allclose(series[1]["values"], reading.rollout, rtol=1e-4)
    keys = [f"{one['layer']}.{one['head']}" for one in reading.maps]
    assert block_of(data, "map")["dots"] == keys
    layer, head = map(int, keys[0].split("."))
    item = block_of(data, "detail")["items"][2 * layer + head]
    blocks = {(block["from"], block["to"]): unpacked(block["map"]) for block in item["blocks"][0]["maps"]}
    row = attention[layer, head]
    assert np.allclose(blocks["image", "text"], row[6:, :6].flatten(), rtol=6e-3)
    assert np.allclose(blocks["text", "image"], row[:6, 6:].flatten(), rtol=6e-3)


def test_the_page_stands_alone_and_texts_are_data():
    _, reading = made(tokens=[EVIL] * 10, name=EVIL)
    text = pages.page(reading)
    assert "<img" not in text
    assert text.count("<script>") == 1
    assert "img-src" not in text  # there is no picture in it
    assert not re.search(r"https?://(?!www.w3.org)|@import|url\(", text)


def test_leading_dimensions_of_any_number_have_a_page():
    for lead in ((), (2,), (3, 2), (3, 4, 2)):
        reading = kq.flow(torch.full((*lead, 4, 4), 0.25), ["a", "a", "b", "b"], keep=1)
        data = data_of(pages.page(reading))
        assert flow_of(data).shape == {0: (1, 1), 1: (1, 2)}.get(len(lead), (3, 2))
        assert len(depths(reading)) == (lead[0] if len(lead) > 1 else 1)
        assert "Cross-modal attention" in shown(reading)
    assert grid(reading, reading.raw).shape == (3, 2)
    assert "reciprocity" not in views(reading)  # nothing varies


def test_layers_without_heads_stand_one_above_the_other():
    reading = kq.flow([torch.full((4, 4), 0.25)] * 3, ["a", "a", "b", "b"], keep=2)
    assert flow_of(data_of(pages.page(reading))).shape == (3, 1)
    assert "attention: 3 layers, 1 head\n" in shown(reading)
    assert len(reading.plot().axes[0].images[0].get_array()) == 3


def test_a_notebook_shows_the_page():
    assert made()[1]._repr_html_().startswith("<iframe")


@pytest.mark.few(1)  # those of a look are written in every format
@pytest.mark.parametrize(("name", "start"), [("f.svg", b"<?xml"), ("f.png", b"\x89PNG"), ("f.pdf", b"%PDF")])
def test_pictures(name, start):
    assert pages.picture_bytes(Path(name), made()[1]).startswith(start)


def test_figures_have_a_map_and_a_curve():
    _, reading = made()
    axes = reading.plot(view="reciprocity").axes
    assert np.allclose(axes[0].images[0].get_array(), reading.reciprocity)
    axes = reading.plot().axes
    assert np.allclose(axes[0].images[0].get_array(), 100 * np.array(reading.corrected))
    rolled = axes[1].lines[2].get_xdata()
    assert np.allclose(rolled, 100 * np.array(reading.rollout))
    with pytest.raises(ValueError, match=r"view must be one of 'flow', .*, got 'flaw'"):
        reading.plot(view="flaw")


def test_the_terminal_tells_layers_and_heads():
    _, reading = made()
    text = shown(reading)
    assert "attention: 3 layers, 2 heads" in text
    assert "tokens: 6 image, 4 text" in text
    best = reading.maps[0]
    assert f"{best['layer']}.{best['head']} {100 * best['net_above_chance']:+.1f}" in text
    assert "Heads furthest above chance, net of sinks" in text
    mean = np.mean(reading.raw)
    assert f"Cross-modal attention: {mean:.1%} on average" in text
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    past = causal / causal.sum(1, keepdim=True)
    told = shown(kq.flow(past, ["a", "special", "b", "b"], mask=causal))
    assert "1 special excluded" in told
    assert "Reciprocity is undefined" in told


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    vision.photograph().save(root / "photograph.png")
    for name in ("vilt", "llava", "clip"):
        model, processor = getattr(vision, name)(), getattr(vision, f"{name}_processor")()
        vision.saved(root / name, model, processor)
    return root


@pytest.mark.parametrize("name", ["vilt", "llava"])
def test_the_command_on_an_image_and_a_text(folders, tmp_path, name):
    names = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "html")}
    files = [part for kind, path in names.items() for part in (f"--{kind}", str(path))]
    options = [
        "--image",
        str(folders / "photograph.png"),
        "--text",
        vision.TEXT,
        "--picture",
        str(tmp_path / "out.svg"),
    ]
    result = run(cli.app, ["flow", str(folders / name), *options, *files])
    assert result.exit_code == 0, result.output
    reading = kq.Reading.load(names["json"])
    assert reading.counts["text"] == 6
    assert len(reading.maps) == 8
    assert json.loads(names["json"].read_text())["kind"] == "flow"
    assert names["csv"].read_text().startswith("layer,head,raw,residual,weighted,net,raw_above_chance")
    text = names["html"].read_text()
    assert "; img-src data:; " in text
    assert data_of(text)["tabs"][0]["text"]["picture"]["grid"] == ([4, 5] if name == "vilt" else [4, 4])


def test_the_command_counts_special_tokens_if_told_to(folders):
    options = ["--image", str(folders / "photograph.png"), "--text", vision.TEXT, "--special", "count"]
    result = run(cli.app, ["flow", str(folders / "vilt"), *options])
    assert result.exit_code == 0, result.output
    assert "tokens: 3 special, 6 text, 20 image" in result.output


def test_the_command_on_two_texts():
    result = run(cli.app, ["flow", str(kq.models.ENCODER), "--text", "The ship was old.", "--text", "So was she."])
    assert result.exit_code == 0, result.output
    assert "encoder: 4 layers, 4 heads" in result.output
    assert "tokens: 5 first text, 4 second text" in result.output


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        ("vilt", [], "give --text TEXT together"),
        ("vilt", ["--text", "a cat"], "pass a text and an image, or two texts, got 1"),
        ("vilt", ["--text", "", "--image", "photograph.png"], "text must contain words"),
        ("vilt", ["--text", "a cat", "--image", "none.png"], "image file not found"),
        (
            "vilt",
            ["--text", "a cat", "--image", "photograph.png", "--special", "x"],
            "--special must be leave or count",
        ),
        ("clip", ["--text", "a cat", "--image", "photograph.png"], "towers without attention between them"),
        ("none", ["--text", "a cat", "--image", "photograph.png"], "there is no "),
    ],
)
def test_bad_commands_are_told_in_a_sentence(folders, model, arguments, sentence):
    given = [str(folders / part) if part.endswith(".png") else part for part in arguments]
    result = run(cli.app, ["flow", str(folders / model), *given])
    assert isinstance(result.exception, (ValueError, OSError))
    assert sentence in str(result.exception)


def test_the_command_on_an_image_alone(folders, tmp_path):
    vision.saved(tmp_path / "vit", vision.vit(), vision.vit_processor())
    options = ["--image", str(folders / "photograph.png"), "--html", str(tmp_path / "out.html")]
    result = run(cli.app, ["flow", str(tmp_path / "vit"), *options])
    assert result.exit_code == 0, result.output
    assert "tokens: 1 class, 16 image" in result.output
    assert "Attention between class token and patches" in result.output
    data = data_of((tmp_path / "out.html").read_text())
    assert data["tabs"][0]["text"]["picture"]["grid"] == [4, 4]
    item = next(item for item in block_of(data, "detail")["items"] if item["blocks"])
    maps = item["blocks"][0]["maps"]
    ways = [("class", "image"), ("image", "class"), ("image", "image")]
    assert sorted((block["from"], block["to"]) for block in maps) == ways
    assert [len(block["popularity"]) for block in maps if block["from"] == "image"] == [16, 16]
