"""What the pages of lineages hold; that they open, fit, sort and stay within their policy is tested with all pages."""

import copy

import torch

import keyquery as kq
from keyquery.pages import page
from tests.pages.kinds import reading
from tests.pages.readings import block_of, data_of, measure_of


def test_the_page_of_two_models_has_all_pairs_of_layers_and_every_head():
    torch.manual_seed(0)
    base = kq.Decoder(64, depth=4, heads=4)
    other = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0
    lineage = kq.lineage(base, other)
    data = data_of(page(lineage))
    assert block_of(data, "summary")["sentences"][0].endswith(": fine-tuned.")
    shared = measure_of(data, "shared basis")
    assert (len(shared["values"]), shared["path"]) == (16, [0, 1, 2, 3])
    (heads,) = block_of(data, "curve")["series"]
    assert heads["items"] == [f"{layer}.{head}" for layer in range(4) for head in range(4)]
    assert heads["values"] == [value for row in lineage.tests[1]["similarity"] for value in row]
    moved = [block for block in data["tabs"][0]["blocks"] if block["type"] == "table"][1]["columns"][1]["values"]
    assert len(moved) == 16
    assert moved == sorted(moved, reverse=True)
    assert "not of who copied whom" in data["notes"][0]


def test_the_page_of_relatives_has_every_model_that_was_tested():
    data = data_of(page(reading("lineage search")))
    assert block_of(data, "summary")["sentences"] == ["1 model of 5 shares weights with mine."]
    names, related, p = (column["values"] for column in block_of(data, "table")["columns"][:3])
    assert (names, related, p) == (["near", "far"], ["yes", "no"], ["1.0e-09", "5.0e-01"])
