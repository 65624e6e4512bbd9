"""Readings that were forged: refused by their fields and types, in one sentence, before anything is built or shown."""

import io
import json

import pytest
import torch
from rich.console import Console

import keyquery as kq
from keyquery.instruments.look.show.terminal import WIDEST, Bar
from keyquery.pages import terminal
from keyquery.reading import Reading
from tests.hostile import assert_read, assert_refused

pytestmark = pytest.mark.unchecked
CONTENT = {"symmetric": 0.5, "skew": 0.25, "popularity": 0.25, "query_only": 0.0}
SHARES = {"symmetry": 0.5, **CONTENT, "position": 0.1, "interaction": -0.1}
INTERVALS = {"intervals": {name: [0.1, 0.9] for name in SHARES}}


@pytest.fixture(scope="module")
def look():
    return kq.look(torch.nn.MultiheadAttention(8, 2), name="two").to_dict()


def changed(look, **changes):
    return json.dumps({**look, **changes})


def with_head(look, **changes):
    return changed(look, heads=[{**look["heads"][0], **changes}, *look["heads"][1:]])


def shown(text):
    out = io.StringIO()
    terminal.show(Reading.load(text), Console(file=out, width=100, force_terminal=False))
    return out.getvalue()


FORGED = {
    "a share of 1e8": ({"on_data": {**SHARES, "symmetric": 1e8}}, "symmetric must be a number from −100 to 100"),
    "a share of −1e8": ({"on_data": {**SHARES, "skew": -1e8}}, "skew must be a number from −100 to 100"),
    "an interval of 1e8": ({"on_data": {**SHARES, "low": {"skew": [0, 1e8]}}}, "low.skew[1] must be a number from"),
    "a list without end": ({"on_data": {**SHARES, "more": [0.5] * 10_001}}, "at most 10000 items"),
    "a share that is missing": ({"on_data": {"symmetry": 0.5}}, "on_data.symmetric must be a number"),
    "shares that are a list": ({"on_data": [1]}, "on_data.symmetry must be a number"),
    "a head far away": ({"head": 10**12}, "head must be from 0 to 4095"),
    "a layer below none": ({"layer": -1}, "layer must be from 0 to 4095"),
    "a cost without an interval": ({"ablation": {"zero": [0.1]}}, "ablation must be change, low and high by name"),
    "costs that are a list": ({"ablation": [0.1, 0.0, 0.2]}, "ablation must be change, low and high by name"),
    "a symmetry of 1e8": ({"raw": {"symmetry": 1e8, "effective_rank": 1.0}}, "raw.symmetry must be a number from"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_heads_are_refused(case, look):
    changes, words = FORGED[case]
    assert_refused(lambda: shown(with_head(look, **changes)), words, growth=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"provenance": [1, 2]}, "provenance must be an object, got [1, 2]"),
        ({"provenance": None}, "provenance must be an object, got None"),
        ({"colour": 1}, "unknown field 'colour'; its fields are provenance, model"),
        ({"\x1b[2J": 1}, r"unknown field '\x1b[2J'"),
        ({"layers": {}}, "layers must be a list"),
        ({"heads": [[]]}, "heads[0] must be an object"),
        ({"sample": 3}, "sample must be an object"),
        ({"model": {"name": "a", "layers": 10**9, "width": 8}}, "model.layers must be from 0 to 4096"),
    ],
)
def test_forged_fields_are_refused(changes, words, look):
    assert_refused(lambda: Reading.load(changed(look, **changes)), words, growth=64)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1E309", "1" * 400 + ".5", "9" * 300 + "e10"])
def test_numbers_are_finite(text):
    with pytest.raises(ValueError, match="not a reading"):
        Reading.load(f'{{"kind": "reading", "schema": 1, "provenance": {{"a": [{text}]}}}}')


def test_a_missing_field_is_named(look):
    with pytest.raises(ValueError, match="not a reading of kind 'look': the field 'heads' is missing"):
        Reading.load(json.dumps({key: value for key, value in look.items() if key != "heads"}))


@pytest.mark.parametrize("data", [None, SHARES, {**SHARES, **INTERVALS}])
def test_what_a_look_holds_is_read(data, look):
    assert Reading.load(with_head(look, on_data=data)).heads[0]["on_data"] == data


def test_nested_lists_are_refused_soon(look):
    text = changed(look, provenance={"a": "HERE"}).replace('"HERE"', "[" * 40 + "[[[]]]," * 1_700_000 + "1" + "]" * 40)
    assert_refused(lambda: Reading.load(text), "lists and objects", seconds=5, growth=200)


def test_many_numbers_are_read(look):
    text = changed(look, provenance={"a": "HERE"}).replace('"HERE"', json.dumps([0.125] * 1_000_000))
    assert_read(lambda: Reading.load(text), seconds=10, growth=200)


def test_names_bring_no_escape_codes_to_a_terminal(look):
    evil = "\x1b[2J\x1b]0;title\x07\x9b31m\r"
    model = {**look["model"], "name": f"two{evil}", "family": evil}
    text = json.dumps({**look, "model": model, "heads": [{**head, "label": evil} for head in look["heads"]]})
    said = shown(text)
    assert r"two\x1b[2J" in said
    assert not any(sign in said for sign in "\x1b\x07\x9b\r")


def bar(shares):
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=False).print(Bar(shares))
    return out.getvalue().rstrip("\n")


def test_a_bar_is_no_longer_than_a_bar():
    for shares in ([1e8, 0, 0, 0, 0], [-1e8, 1e8, 3, 0, 0], [0.5, 0.6, 0.7, 0.8, 0.9], [1, -1, 1, -1, 1]):
        assert len(bar(shares)) <= WIDEST
    assert bar([0.5, 0.25, 0.25, 0.0, 0.0]) == "█" * 12 + "▓" * 6 + "▒" * 6
