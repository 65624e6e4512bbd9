"""Estimates against brute force: derivatives by central differences, the Fisher form by its definition."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.instruments.ablation.changes import Change, Trial
from keyquery.instruments.ablation.estimate import estimate
from keyquery.instruments.ablation.losses import OUTPUT, Objective, next_token_loss
from keyquery.instruments.ablation.named import Made
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.proof.families import tiny_model
from tests.instruments.ablation.oracles import (
    CAUSAL,
    curvature,
    decoder,
    exact,
    losses_of_logits,
    moves_of,
    slope,
    text,
)

CHANGES = ("skew", "only position + query_only", "zero", "window 2", "keys 2")
UNPLACED = ("skew", "only popularity", "zero", "window 2", "keys 2")
COPIES, SAMPLES = 500, 8  # 4,000 draws


@pytest.fixture(autouse=True)
def _in_double(monkeypatch, request):
    if "gpt_oss" not in request.node.name:  # whose experts know no float64
        exact(monkeypatch)


def estimated(model, batch, changes, cells, **options):
    """Estimates of changes by name, with means over the batch."""
    sites = sites_of(model)
    means = Means(model, [batch], "global")
    made = Made(model, [batch], sites, {index: range(site.count) for index, site in sites.items()}, lambda: means)
    loss = options.pop("loss", next_token_loss)
    trials = [Trial(made.change(name), cells) for name in changes]
    by_site = {index: means.of(site) for index, site in sites.items()}
    return estimate(model, [batch], loss, trials, sites, by_site, **options)


def terms_of(terms, change, cells):
    """First and second term of a change of some heads, by site, per label."""
    return terms.of(Trial(Change(change, lambda heads: heads.output), cells))


@pytest.mark.parametrize("name", CAUSAL)
def test_the_first_term_is_the_derivative_along_the_change(name):
    model, batch = decoder(name), text()
    placed = any(site.placed for site in sites_of(model).values())
    changes, cells = CHANGES if placed else UNPLACED, {0: [1], 1: [0, 3]}
    terms = estimated(model, batch, changes, cells, samples=1)
    limit, step = (1e-2, 1e-2) if name == "gpt_oss" else (1e-6, 1e-3)
    with torch.no_grad():
        losses = losses_of_logits(model(**batch).logits, batch["input_ids"])
    torch.testing.assert_close(terms.losses, losses)
    for change in changes:
        heads = ({0: [1]}, {1: [3]})
        for cell, moves in zip(heads, moves_of(model, batch, change, *heads), strict=True):
            derivative = slope(model, batch, moves, step)
            first, _ = terms_of(terms, change, cell)
            assert first.abs().max() > 1e-6
            torch.testing.assert_close(first, derivative, rtol=limit, atol=limit * float(derivative.abs().max()))


def test_encoder_decoders_have_costs_too():
    model, batch = tiny_model("t5", model="T5ForConditionalGeneration").double(), text(rows=2)
    batch["decoder_input_ids"] = batch["input_ids"]
    cells = {index: [1] for index in sites_of(model)}
    terms = estimated(model, batch, ["symmetric", "zero"], cells, samples=1)
    for change in ("symmetric", "zero"):
        for index, moves in zip(cells, moves_of(model, batch, change, *({index: [1]} for index in cells)), strict=True):
            derivative = slope(model, batch, moves, 1e-4)  # its attention is not scaled, and bends early
            torch.testing.assert_close(terms_of(terms, change, {index: [1]})[0], derivative, rtol=1e-6, atol=1e-9)


def test_a_module_that_is_called_in_every_layer_has_the_sum_of_its_calls():
    model, batch = tiny_model("albert", model="AlbertForMaskedLM").double(), text(rows=2)
    terms = estimated(model, batch, ["skew", "zero"], {0: [2]}, samples=1)
    for change in ("skew", "zero"):
        moves = moves_of(model, batch, change, {0: [2]})
        assert len(moves[0]) == 2
        derivative = slope(model, batch, moves)
        torch.testing.assert_close(terms_of(terms, change, {0: [2]})[0], derivative, rtol=1e-6, atol=1e-9)


def repeated(batch):
    return {name: x.repeat(COPIES, *[1] * (x.ndim - 1)) for name, x in batch.items()}


def assert_near(draws, expected):
    """The mean over draws is exact up to three standard errors."""
    error = float(draws.std()) / len(draws) ** 0.5
    assert abs(float(draws.mean()) - float(expected)) < 3 * error
    assert error < 0.1 * float(expected)


def halves(terms, change, cells):
    """Every draw of the second term, per label."""
    heads = [(index, head) for index, numbers in cells.items() for head in numbers]
    products = torch.stack([terms.terms[change, cell][1:] for cell in heads]).sum(0)
    return (products.square() / 2 / terms.counts).flatten()


@pytest.mark.parametrize(
    ("name", "change", "cells"),
    [
        ("llama", "skew", {1: [2]}),
        ("llama", "zero", {0: [0, 1], 1: [3]}),  # joint: squared after summing over heads and layers
        ("gpt2", "uniform", {0: [0, 1, 2, 3]}),
        ("gemma2", "keys 2", {0: [2, 3]}),
    ],
)
def test_the_second_term_is_half_the_fisher_form(name, change, cells):
    model, batch = decoder(name), text(rows=1)
    form = curvature(model, batch, moves_of(model, batch, change, cells))
    terms = estimated(model, repeated(batch), [change], cells, samples=SAMPLES)
    draws = halves(terms, change, cells)
    assert len(draws) == COPIES * SAMPLES
    assert_near(draws, form)
    torch.testing.assert_close(terms_of(terms, change, cells)[1].mean(), draws.mean())
    if len(cells) > 1:
        assert not torch.allclose(draws, sum(halves(terms, change, {i: heads}) for i, heads in cells.items()), rtol=0.1)


class Linear(nn.Module):
    """Attention whose output is read out linearly, so that the squared change is exact."""

    def __init__(self):
        super().__init__()
        self.attention = kq.Attention(8, heads=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x, attention_mask=None):
        return self.head(self.attention(x, mask=None if attention_mask is None else attention_mask.bool()))


def test_without_a_loss_the_estimate_is_the_squared_change_of_the_output():
    model, x = Linear().double().eval(), torch.randn(1, 6, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    batch = {"x": x, "attention_mask": mask}
    with torch.no_grad():
        before = model(**batch)[:, :4]
        with kq.ablate_heads(model, heads="0.1"):
            after = model(**batch)[:, :4]
    change = (after - before).square().sum() / before.square().sum()
    terms = estimated(model, repeated(batch), ["zero"], {0: [1]}, samples=SAMPLES, loss=OUTPUT)
    assert_near(halves(terms, "zero", {0: [1]}), change)
    assert not terms_of(terms, "zero", {0: [1]})[0].any()
    data = [{"x": torch.randn(3, 6, 8, dtype=torch.float64)}]
    measured = kq.ablate(model, data, changes="zero", measure="all", samples=200)
    assert (measured.unit, measured.objective, measured.loss) == ("share of the output's squared norm", "output", 0.0)
    for row in measured.rows:
        assert row["estimate"] == pytest.approx(row["change"], rel=0.3)
        assert row["first"] == 0


@pytest.mark.parametrize("by", ["layer", "all", {"two": ["0.1", "1.2"], "one": ["0.1"]}])
def test_joint_estimates_are_of_all_heads_at_once(by):
    model, batch = decoder("llama"), text(rows=4)
    ablation = kq.ablate(model, [batch], changes=["skew", "zero"], by=by, means="global", measure="none", samples=2)
    every = {index: list(range(4)) for index in range(2)}
    sets = {
        "layer": [{0: every[0]}, {1: every[1]}],
        "all": [every],
    }.get(by if isinstance(by, str) else "", [{0: [1], 1: [2]}, {0: [1]}])
    names = [(cells, change) for cells in sets for change in ("skew", "zero")]
    assert [row["part"] for row in ablation.rows] == [change for _, change in names]
    for row, (cells, change) in zip(ablation.rows, names, strict=True):
        derivative = slope(model, batch, moves_of(model, batch, change, cells)).mean()
        assert row["first"] == pytest.approx(float(derivative), rel=1e-6)
        assert row["estimate"] == pytest.approx(row["first"] + row["second"])
    if not isinstance(by, str):
        assert [(row["layer"], row["head"], row["set"]) for row in ablation.rows[::2]] == [
            (None, None, "two"),
            (None, None, "one"),
        ]


def test_keys_of_a_group_change_together():
    model, batch = decoder("llama"), text(rows=4)
    ablation = kq.ablate(model, [batch], changes=["keys 3", "values 3"], measure="none", heads=["0.*", "1.0"])
    assert [(row["layer"], row["head"], row["key_head"]) for row in ablation.rows[::2]] == [
        (0, None, 0),
        (0, None, 1),
        (1, None, 0),
    ]
    for row in ablation.rows:
        group = [2 * row["key_head"], 2 * row["key_head"] + 1]
        derivative = slope(model, batch, moves_of(model, batch, row["part"], {row["layer"]: group}))
        assert row["first"] == pytest.approx(float(derivative.mean()), rel=1e-6)


def test_classes_and_losses_of_ones_own():
    model = tiny_model("bert", model="BertForSequenceClassification", num_labels=3).double()
    batch = {**text(rows=4), "labels": torch.tensor([0, 2, 1, 1])}
    ids, labels = {"input_ids": batch["input_ids"]}, batch["labels"]
    objective = Objective("classes", lambda model, batch: (ids, labels), "nats per label")
    classes = kq.ablate(model, [batch], objective, changes="zero", measure="all", samples=2)
    assert (classes.objective, classes.unit) == ("classes", "nats per label")

    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch["input_ids"]).logits, batch["labels"], reduction="none")

    mine = kq.ablate(model, [batch], losses, changes="zero", measure="all")
    for row, expected in zip(mine.rows, classes.rows, strict=True):
        assert row["change"] == pytest.approx(expected["change"], rel=1e-9)
        assert row["first"] == pytest.approx(expected["first"], rel=1e-9)
        assert row["second"] == 0


def test_estimates_of_long_data_are_those_of_its_parts(monkeypatch):
    """However sequences are batched: labels are drawn by sequence."""
    model, batch = decoder("llama"), text(rows=6)
    options = {"changes": ["skew", "keys 2 per channel"], "means": "global", "measure": "none"}
    whole = kq.ablate(model, [batch], **options).rows
    monkeypatch.setattr("keyquery.instruments.ablation.estimate.TOKENS", {"cpu": 12})
    monkeypatch.setattr("keyquery.instruments.ablation.estimate.MAP", {"cpu": 1})
    split = [{"input_ids": rows} for rows in batch["input_ids"].split((1, 3, 2))]
    for parts in ([batch], split):
        for row, expected in zip(kq.ablate(model, parts, **options).rows, whole, strict=True):
            for name in ("first", "second", "low", "high"):
                assert row[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12)
