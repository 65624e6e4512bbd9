"""Wiring: shares of score variance by source, against the tables of single pairs and planted circuits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.attribution import wiring as module
from tests.instruments.attribution.circuit import built, repeated_halves
from tests.instruments.attribution.models import IDS, build, inputs, softmax_inputs

pytest.importorskip("transformers")
TWO = torch.cat((IDS, IDS.flip(1)))


@pytest.mark.parametrize("name", ["gpt2", "bert", "deepseek"])
@pytest.mark.few(1)
def test_shares_are_those_of_the_tables_of_all_pairs(name):
    """One sequence twice: its shares are the sums over one side of the table that `attribute` gives of it."""
    model = build(name)
    batch = {key: value.repeat(2, 1) for key, value in inputs(model).items()}
    reading = kq.wiring(model, inputs=batch)
    for head in (reading.heads[-1]["name"], reading.heads[-4]["name"]):
        table = kq.attribute(model, inputs=inputs(model), head=head)
        for side in ("query", "key"):
            shares = {row["source"]: row["share"] for row in reading.of(head, side)}
            expected = table.by_source(side)
            assert shares == pytest.approx({s: expected[s] for s in shares}, rel=1e-4, abs=1e-5)
            assert all(row["high"] - row["low"] < 1e-4 for row in reading.of(head, side))


@pytest.mark.slow
def test_the_interval_is_that_of_the_jackknife_over_sequences():
    model = build("llama")
    ids = torch.randint(3, 60, (6, 7), generator=torch.Generator().manual_seed(0))
    reading = kq.wiring(model, inputs={"input_ids": ids})
    tables = [kq.attribute(model, inputs={"input_ids": row[None]}, head="1.2") for row in ids]
    totals = np.array([_squares(softmax_inputs(model, row[None])["layers.1.self_attn"][2]) for row in ids])
    shares = np.array([np.sum(table.table["share"], 0) for table in tables])  # key side
    parts = shares * totals[:, None]
    left_out = (parts.sum(0) - parts) / (totals.sum() - totals)[:, None]
    errors = dict(zip(tables[0].sources, np.sqrt((len(ids) - 1) * left_out.var(0)), strict=True))
    for row in reading.of("1.2", "key"):
        half = 2.571 * errors[row["source"]]  # Student's t at 5 degrees of freedom
        # The linearised error and the jackknife agree up to terms of order 1/sequences.
        assert (row["high"] - row["low"]) / 2 == pytest.approx(half, rel=0.25, abs=1e-4)


def _squares(scores):
    """Squares of the visible scores of each query about their mean."""
    rows = [scores[query, : query + 1].double() for query in range(len(scores))]
    return sum(float((row - row.mean()).square().sum()) for row in rows)


def test_the_planted_path_is_the_only_one_above_its_null():
    reading = kq.wiring(built(), inputs={"input_ids": repeated_halves()})
    first = reading.of("1.0", "key")[0]
    assert first["source"] == "0.0"
    assert first["share"] == pytest.approx(1, abs=1e-3)
    assert [row["source"] for row in reading.of("1.0", "key") if row["clear"]] == ["0.0"]
    assert [row["source"] for row in reading.of("1.0", "query") if row["clear"]] == ["token embedding"]
    shown = [row for row in reading.examples if row["head"] == "1.0" and row["side"] == "key"]
    for pair in shown[0]["pairs"]:  # the key stands behind the twin of the query
        tokens = reading.texts[pair["sequence"]]
        assert tokens[pair["key"] - 1] == tokens[pair["query"]]
    assert kq.Reading.load(reading.to_json()) == reading
    assert {"head", "side", "source", "share", "low", "high", "null", "clear"} == {*reading.to_frame()}


@pytest.mark.slow
def test_padding_and_the_size_of_batches_change_nothing(monkeypatch):
    model = build("llama")
    batch = {"input_ids": TWO, "attention_mask": torch.ones_like(TWO)}
    longer = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in batch.items()}
    plain, padded = (kq.wiring(model, inputs=data) for data in (batch, longer))
    monkeypatch.setattr(module, "MEMORY", 1)  # one sequence at a time
    single = kq.wiring(model, inputs=batch)
    for other in (padded, single):
        assert other.tokens == plain.tokens
        for side in ("query", "key"):
            np.testing.assert_allclose(other.heads[-1][side]["share"], plain.heads[-1][side]["share"], atol=2e-4)
