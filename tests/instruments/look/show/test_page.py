"""The page as a file: its size, its policy, and that every text in it is data."""

import base64
import hashlib
import re
from html import unescape
from importlib import import_module

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.show.heads import ATTENTION, OBJECTS, SPECTRA
from keyquery.pages.colours import DARK, LIGHT
from keyquery.pages.document import ASSETS, page
from tests.pages.readings import EVIL, block_of, crowd, data_of, measure_of, tiny, unpacked

run = CliRunner().invoke


@pytest.fixture(scope="module")
def evil():
    pytest.importorskip("transformers")
    _, _, reading = tiny("llama", name=EVIL)
    return reading


def chart(tab, index, number):
    """What the page brings for one chart of a head, by the number of its template."""
    blocks = block_of({"tabs": [tab]}, "detail")["items"][index]["blocks"]
    return next(block for block in blocks if block["of"] == number)


def maps_of(tab):
    """The attention maps of every head."""
    heads = range(len(block_of({"tabs": [tab]}, "detail")["items"]))
    return [text for head in heads for _, text in chart(tab, head, ATTENTION)["maps"]]


@pytest.mark.unchecked  # as users run it: the checks would look at every number of the reading
@pytest.mark.parametrize("rotary", [False, True])
def test_144_heads_fit_into_a_megabyte(rotary):
    html = page(crowd(12, 12, 64, 24, rotary))
    assert len(html.encode()) <= 1_000_000
    model = data_of(html)["tabs"][0]
    kept = len(model["tokens"])
    assert kept == (24 if rotary else 18)  # a causal head has half of the pairs
    numbers = kept * (kept + 1) // 2 if rotary else kept**2
    assert all(len(base64.b64decode(text)) == numbers for text in maps_of(model))
    assert any("tokens are included" in note for note in model["notes"]) == (not rotary)
    assert not any("cut" in note for note in model["notes"])


@pytest.mark.unchecked  # as above
def test_few_heads_keep_all_tokens():
    assert len(data_of(page(crowd(4, 4, 8, 24, False)))["tabs"][0]["tokens"]) == 24


@pytest.mark.unchecked  # as users run it: the checks would look at every number of the reading
@pytest.mark.parametrize("rotary", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_1024_heads_stay_below_five_megabytes_and_say_what_was_left_out(rotary):
    html = page(crowd(32, 32, 128, 24, rotary))
    assert len(html.encode()) < 5_000_000
    model = data_of(html)["tabs"][0]
    kept = len(model["tokens"])
    assert 8 <= kept < 24
    numbers = kept * (kept + 1) // 2 if rotary else kept**2
    assert all(len(base64.b64decode(text)) == numbers for text in maps_of(model))
    assert f"With 1,024 heads, only the first {kept} of 24 tokens are included; the JSON has all." in model["notes"]
    assert any("spectra are cut to their 64 outermost values" in note for note in model["notes"])


def assert_maps(packed, parts):
    """Attention and centred parts of causal scores, each to half of a step of 1/127 of its largest number."""
    below = torch.ones(parts.shape[1:], dtype=torch.bool).tril()
    attention = parts.sum(0).masked_fill(~below, -torch.inf).softmax(-1)
    centred = parts - torch.stack([row[: i + 1].mean() for part in parts for i, row in enumerate(part)]).view(5, -1, 1)
    for (step, text), values in zip(packed, (attention, *centred), strict=True):
        counts = np.frombuffer(base64.b64decode(text), "i1")
        assert (step * counts).tolist() == pytest.approx(values[below].tolist(), abs=0.51 * step)
        assert step == pytest.approx(float(values[below].abs().max()) / 127, rel=1e-3)


def test_figures_are_those_of_the_json(evil):
    data = data_of(page(evil))
    for view in ("raw", "folded", "on_data"):
        for name in ("symmetry", *(PARTS if view == "on_data" else ("stable_rank", "effective_rank"))):
            shown = measure_of(data, f"{view}.{name}")
            assert shown["values"] == pytest.approx([head[view][name] for head in evil.heads], rel=1e-4)
            if view == "on_data":
                ends = [head["on_data"]["intervals"][name] for head in evil.heads]
                assert shown["low"] == pytest.approx([low for low, _ in ends], rel=5.1e-3)
                assert shown["high"] == pytest.approx([high for _, high in ends], rel=5.1e-3)
    for index, head in enumerate(evil.heads):
        expected = [head["raw"][name] for name in ("eigenvalues", "skew_values", "singular_values")]
        expected[1] = expected[1][::2]
        packed = chart(data["tabs"][0], index, SPECTRA)["views"]["raw"]["values"]
        for text, values in zip(packed, expected, strict=True):
            assert unpacked(text) == pytest.approx(values, rel=5.1e-3)
        parts = torch.tensor([head["scores"][part] for part in PARTS], dtype=torch.float64)
        assert_maps(chart(data["tabs"][0], index, ATTENTION)["maps"], parts)


def test_the_policy_allows_its_own_script_and_style_and_nothing_else(evil):
    html = page(evil)
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"


def test_nothing_is_asked_of_anyone(evil):
    html = page(evil)
    assert set(re.findall(r"https?:[^\s\"')]*", html)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b|@import|url\(|\bsrc=(?!x )", html)
    script = "".join(path.read_text() for path in ASSETS.glob("*.js"))
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch(", "XMLHttp", "import("):
        assert way not in script


def test_texts_are_data(evil):
    html = page(evil)
    assert EVIL not in html
    assert html.count("<script") == 2
    assert html.count("</script>") == 2
    assert data_of(html)["name"] == EVIL
    assert EVIL in data_of(html)["tabs"][0]["tokens"]
    assert "{{style}}" in page(kq.look(torch.nn.MultiheadAttention(8, 2), name="{{style}}"))


def test_a_notebook_shows_the_page_in_a_frame(evil):
    html = evil._repr_html_()
    assert html.startswith("<iframe")
    assert html.count("<") == 2  # the frame's own two tags: all else is escaped
    assert 'sandbox="allow-scripts"' in html
    assert unescape(re.search(r'srcdoc="([^"]*)"', html)[1]) == page(evil)
    assert kq.compare(evil, evil)._repr_html_().startswith("<iframe")
    assert kq.Reading()._repr_html_().startswith("<table>")


def test_what_is_missing_is_said():
    _, _, bare = tiny("bert", sample=0, directions=0)
    notes = " ".join(data_of(page(bare))["tabs"][0]["notes"])
    assert "--text FILE" in notes
    assert "--directions 4" in notes
    weights = kq.look(tiny("bert")[0], name="weights")
    assert "keyquery look MODEL --text FILE --html page.html" in " ".join(data_of(page(weights))["tabs"][0]["notes"])


def test_colours_of_the_parts_are_the_same_everywhere():
    light, dark = (ASSETS / "page.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    for part, colour in LIGHT.items():
        assert f"--{part}: {colour};" in light
        assert f"--{part}: {DARK[part]};" in dark


# The command line


def test_look_and_compare_write_page_and_picture(tmp_path):
    html, picture = tmp_path / "page.html", tmp_path / "triangle.svg"
    json_file = tmp_path / "look.json"
    told = run(
        cli.app,
        [
            "look",
            str(kq.models.DECODER),
            "-q",
            "--html",
            str(html),
            "--picture",
            str(picture),
            "--json",
            str(json_file),
        ],
    )
    assert told.exit_code == 0, told.output
    assert html.read_text() == page(kq.Reading.load(json_file))
    assert picture.read_text().startswith("<svg")
    both, joined = tmp_path / "both.html", tmp_path / "joined.svg"
    arguments = [
        "compare",
        str(json_file),
        str(json_file),
        "-q",
        "--html",
        str(both),
        "--picture",
        str(joined),
        "--joined",
    ]
    assert run(cli.app, arguments).exit_code == 0
    assert len(data_of(both.read_text())["tabs"]) == 3  # what differs, and each model
    assert 'class="arrow"' in joined.read_text()


def test_a_page_of_a_text_has_tokens_and_directions(tmp_path):
    from tests.instruments.look.test_look import folder_with_tokenizer

    path, text = folder_with_tokenizer(tmp_path, "bert")
    html = tmp_path / "page.html"
    told = run(cli.app, ["look", str(path), "--text", str(text), "-q", "--html", str(html)])
    assert told.exit_code == 0, told.output
    model = data_of(html.read_text())["tabs"][0]
    assert model["tokens"] == text.read_text().splitlines()[0].split()
    assert len(chart(model, 0, OBJECTS)["rows"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "{dir}/old.html"], "already exists; use --force to replace it"),
        (["--html", "{dir}/none/page.html"], "no folder"),
        (["--html", "{dir}/a.html", "--json", "{dir}/a.html"], "--json and --html name the same file"),
        (["--picture", "{dir}/a.svg", "--html", "{dir}/./a.svg"], "--html and --picture name the same file"),
        (["--picture", "{dir}/a.gif"], "a figure must be a .pdf, .png or .svg file"),
    ],
)
def test_targets_are_checked_before_any_work(tmp_path, monkeypatch, arguments, words):
    (tmp_path / "old.html").write_text("old")
    monkeypatch.setattr(
        import_module("keyquery.cli.look"), "look_at", lambda *_, **__: pytest.fail("the model was looked at")
    )
    told = run(cli.app, ["look", *(argument.format(dir=tmp_path) for argument in arguments)])
    assert told.exit_code != 0
    assert words in str(told.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
