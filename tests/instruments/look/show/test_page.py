"""The page as a file: its size, its policy, and that every text in it is data."""

import base64
import hashlib
import re
from html import unescape

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.pages.colours import DARK, LIGHT
from keyquery.pages.document import ASSETS, page
from tests.pages.readings import EVIL, block_of, crowd, data_of, measure_of, tiny, unpacked
from tests.processes import run


@pytest.fixture(scope="module")
def evil():
    pytest.importorskip("transformers")
    _, _, reading = tiny("llama", name=EVIL)
    return reading


def chart(tab, index, name):
    """What the page brings for one chart of a head, by its name or type."""
    blocks = block_of({"tabs": [tab]}, "detail")["items"][index]["blocks"]
    return next(block for block in blocks if name in (block.get("of"), block.get("type")))


def maps_of(tab):
    """The attention maps of every head."""
    heads = range(len(block_of({"tabs": [tab]}, "detail")["items"]))
    return [text for head in heads for _, text in chart(tab, head, "attention")["maps"]]


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
@pytest.mark.slow
def test_1024_heads_stay_below_five_megabytes_and_say_what_was_left_out():
    html = page(crowd(32, 32, 128, 24, True))
    assert len(html.encode()) < 5_000_000
    model = data_of(html)["tabs"][0]
    kept = len(model["tokens"])
    assert 8 <= kept < 24
    assert all(len(base64.b64decode(text)) == kept * (kept + 1) // 2 for text in maps_of(model))
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
        packed = chart(data["tabs"][0], index, "spectra")["views"]["raw"]["values"]
        for text, values in zip(packed, expected, strict=True):
            assert unpacked(text) == pytest.approx(values, rel=5.1e-3)
        parts = torch.tensor([head["scores"][part] for part in PARTS], dtype=torch.float64)
        assert_maps(chart(data["tabs"][0], index, "attention")["maps"], parts)


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
    weights = data_of(page(kq.look(tiny("bert")[0], name="{{style}}")))  # no placeholder of the page
    assert weights["name"] == "{{style}}"
    assert weights["tabs"][0]["notes"][0].endswith("keyquery look MODEL --text FILE --html page.html.")


def test_colours_of_the_parts_are_the_same_everywhere():
    light, dark = (ASSETS / "page.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    for part, colour in LIGHT.items():
        assert f"--{part}: {colour};" in light
        assert f"--{part}: {DARK[part]};" in dark


# The command line


def test_look_and_compare_write_page_and_picture(tmp_path):
    files = {name: tmp_path / f"look.{name}" for name in ("html", "json", "svg")}
    options = ["-q", "--html", files["html"], "--picture", files["svg"], "--json", files["json"], "--tokens", "600"]
    assert run("look", kq.models.DECODER, "--text", kq.models.TEXT, "--no-cost", *options) == ""
    assert files["html"].read_text() == page(kq.Reading.load(files["json"]))
    assert files["svg"].read_text().startswith("<svg")
    model = data_of(files["html"].read_text())["tabs"][0]
    assert len(model["tokens"]) == 24
    assert len(chart(model, 0, "directions")["rows"]) == 4
    both = tmp_path / "both.html"
    run("compare", files["json"], files["json"], "-q", "--html", both)
    assert len(data_of(both.read_text())["tabs"]) == 3  # what differs, and each model
