"""Comparisons in the terminal and as a page: what differs is a map and a ranking, or rows side by side."""

import copy

import pytest
import torch

import keyquery as kq
from keyquery.pages.document import page
from tests.instruments.look.test_compare import stack, tuned
from tests.pages.readings import block_of, data_of, measure_of, shown


def test_the_terminal_shows_a_map_and_a_ranking():
    one = stack()
    both = kq.compare(one, tuned(one))
    text = shown(both)
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "········", "0"] in lines
    assert any(line[:2] == ["1", "····██··"] for line in lines)
    assert "1 of 12 heads differ" in text
    assert any(line and line[0] == "1.2" for line in lines)
    assert not any(line and line[0] == "0.0" for line in lines)
    assert "No head differs" in shown(kq.compare(one, copy.deepcopy(one)))
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.blocks[2].attention_norm.weight.mul_(1.5)
    folded = kq.compare(one, other)
    assert "of the folded weights (only biases or norms differ)" in shown(folded)
    assert not any(row["change"] for row in folded.changes[0]["rows"])
    assert all(row["folded"] > 0.1 for row in folded.changes[0]["rows"][8:])
    data, rows = data_of(page(both)), both.changes[0]["rows"]
    assert measure_of(data, "change")["values"] == pytest.approx([row["change"] for row in rows], rel=1e-4)
    same = len(both.changes[0]["tensors"]["same"])
    tensors = f"{same} of {same + 1} tensors read are identical (by digest); 1 differ: blocks.1.attention.query."
    assert block_of(data, "summary")["sentences"][1] == tensors
    assert tensors in " ".join(text.split())


def test_saved_looks_show_heads_whose_values_differ():
    one = stack()
    looks = [kq.look(model, name=name) for model, name in ((one, "base"), (tuned(one), "tuned"))]
    text = shown(kq.compare(*looks))
    assert "The change of heads was not measured: the weights are not available." in text
    assert "11 of 12 heads have identical values and are not shown" in text
    assert "1.2 " in text
    assert "0.0 " not in text


def test_models_of_different_shapes_are_shown_one_after_the_other():
    text = shown(kq.compare(stack(3), stack(2)))
    assert "The change of heads was not measured: 3 attention layers and 2." in text
    assert text.count("raw symmetry of layers, median:") == 2
