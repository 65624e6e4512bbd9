"""The page as a file: its size, its policy, and that every text in it is data."""

import base64
import hashlib
import json
import re
from html import unescape
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.forms.parts import PARTS
from keyquery.pages.colours import DARK, LIGHT
from keyquery.pages.document import ASSETS, page
from keyquery.pages.packing import pack
from tests.report.readings import EVIL, crowd, tiny

run = CliRunner().invoke


@pytest.fixture(scope="module")
def evil():
    pytest.importorskip("transformers")
    _, _, reading = tiny("llama", name=EVIL)
    return reading


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def unpacked(text):
    """The codes of `pack`, as their definition says."""
    values = []
    for code in np.frombuffer(base64.b64decode(text), "<u2").tolist():
        sign, size = (-1 if code >> 15 else 1), (code & 32767) - 1
        values.append(0.0 if size < 0 else sign * float(f"{100 + size % 900}e{size // 900 - 20}"))
    return values


@given(st.lists(st.floats(-1e15, 1e15, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-15), max_size=20))
def test_packed_numbers_are_those_of_three_digits(values):
    for value, given_back in zip(values, unpacked(pack(values)), strict=True):
        # A value halfway between two such numbers may go to either.
        near = {float(f"{value * (1 + e):.2e}") for e in (0, 1e-12, -1e-12)}
        assert given_back in near


@pytest.mark.unchecked  # as users run it: the checks would look at every number of the reading
@pytest.mark.parametrize("rotary", [False, True])
def test_144_heads_fit_into_a_megabyte(rotary):
    html = page(crowd(12, 12, 64, 24, rotary))
    assert len(html.encode()) <= 1_000_000
    model = data_of(html)["models"][0]
    kept = len(model["tokens"])
    assert kept == (24 if rotary else 18)  # a causal head has half of the pairs
    numbers = kept * (kept + 1) // 2 if rotary else kept**2
    assert all(len(base64.b64decode(text)) == numbers for head in model["heads"] for _, text in head["maps"])
    assert any("tokens are included" in note for note in model["notes"]) == (not rotary)
    assert not any("cut" in note for note in model["notes"])


@pytest.mark.unchecked  # as above
def test_few_heads_keep_all_tokens():
    assert len(data_of(page(crowd(4, 4, 8, 24, False)))["models"][0]["tokens"]) == 24


@pytest.mark.unchecked  # as users run it: the checks would look at every number of the reading
@pytest.mark.parametrize("rotary", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_1024_heads_stay_below_five_megabytes_and_say_what_was_left_out(rotary):
    html = page(crowd(32, 32, 128, 24, rotary))
    assert len(html.encode()) < 5_000_000
    model = data_of(html)["models"][0]
    kept = len(model["tokens"])
    assert 8 <= kept < 24
    numbers = kept * (kept + 1) // 2 if rotary else kept**2
    assert all(len(base64.b64decode(text)) == numbers for head in model["heads"] for _, text in head["maps"])
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
    model = data_of(page(evil))["models"][0]
    for given_head, head in zip(model["heads"], evil.heads, strict=True):
        for view, names in model["columns"].items():
            assert given_head[view] == pytest.approx([head[view][name] for name in names], rel=1e-6)
        expected = [head["raw"][name] for name in ("eigenvalues", "skew_values", "singular_values")]
        expected[1] = expected[1][::2]
        for packed, values in zip(given_head["spectra"]["raw"], expected, strict=True):
            assert unpacked(packed) == pytest.approx(values, rel=5.1e-3)
        assert_maps(given_head["maps"], torch.tensor([head["scores"][part] for part in PARTS], dtype=torch.float64))
        for name, ends in zip(model["columns"]["on_data"], given_head["intervals"]["on_data"], strict=True):
            assert ends == pytest.approx(head["on_data"]["intervals"][name], rel=5.1e-3)


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
    model = data_of(html)["models"][0]
    assert model["name"] == EVIL
    assert EVIL in model["tokens"]
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
    notes = " ".join(data_of(page(bare))["models"][0]["notes"])
    assert "--text FILE" in notes
    assert "--directions 4" in notes
    weights = kq.look(tiny("bert")[0], name="weights")
    assert "keyquery look MODEL --text FILE --html page.html" in " ".join(data_of(page(weights))["models"][0]["notes"])


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
    assert len(data_of(both.read_text())["models"]) == 2
    assert 'class="arrow"' in joined.read_text()


def test_a_page_of_a_text_has_tokens_and_directions(tmp_path):
    from tests.instruments.look.test_look import folder_with_tokenizer

    path, text = folder_with_tokenizer(tmp_path, "bert")
    html = tmp_path / "page.html"
    told = run(cli.app, ["look", str(path), "--text", str(text), "-q", "--html", str(html)])
    assert told.exit_code == 0, told.output
    model = data_of(html.read_text())["models"][0]
    assert model["tokens"] == text.read_text().splitlines()[0].split()
    assert len(model["heads"][0]["objects"]) == 4


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
