"""What attention between datapoints tells under both protocols, beside corrupted rows, and what its heads are like."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from keyquery_studies.datapoints.grid import CELLS, GridTrial
from keyquery_studies.datapoints.predictions import auroc, metrics_of, predict, predict_corrupted, row_heads, shuffled
from keyquery_studies.datapoints.tables import load_kept, prepare_tables, split_of
from keyquery_studies.datapoints.trial import TableTrial, samples_of, settings_of

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples


@pytest.fixture(scope="module")
def facts(sheets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return folder, prepare_tables(sheets, folder, ["yacht"])


def trial(facts, **options):
    small = {"embedding": 8, "depth": 2, "heads": 2, "steps": 12}
    return TableTrial(**{"table": "yacht", "digest": facts[1]["yacht"]["digest"], "fold": 0, **small, **options})


def made(facts, protocol):
    table = load_kept(facts[0], "yacht", facts[1]["yacht"]["digest"])
    fold = split_of("yacht", table, 0)
    return table, fold, *samples_of(table, fold, protocol)


# What a protocol sees


def test_the_published_protocol_standardises_by_all_rows_and_ours_by_those_it_may_know(facts):
    table, fold, _, published = made(facts, "published")
    known = np.concatenate((fold.learned, fold.held))
    inductive = made(facts, "inductive")[3]
    x, y = table.values[5], table.values[6]
    assert (published[5].mean, published[5].scale) == pytest.approx((x.mean(), x.std()))
    assert (inductive[5].mean, inductive[5].scale) == pytest.approx((x[known].mean(), x[known].std()))
    for fields in (published, inductive):
        assert (fields[6].mean, fields[6].scale) == pytest.approx((y[fold.learned].mean(), y[fold.learned].std()))
        assert [field.size for field in fields] == [3, 3, 3, 3, 3, 0, 0]


def test_only_the_published_protocol_learns_from_features_to_test_on(facts):
    _, fold, published, _ = made(facts, "published")
    assert sorted(published.bare) == sorted([*fold.held, *fold.test])
    assert len(made(facts, "inductive")[2].bare) == 0


@pytest.mark.parametrize(("transductive", "masked"), CELLS)
def test_a_cell_of_the_grid_changes_only_its_factors(facts, transductive, masked):
    table = load_kept(facts[0], "yacht", facts[1]["yacht"]["digest"])
    fold = split_of("yacht", table, 0)
    small = {"embedding": 8, "depth": 2, "heads": 2, "steps": 4}
    one = GridTrial(
        table="yacht", digest=facts[1]["yacht"]["digest"], fold=0, transductive=transductive, masked=masked, **small
    )
    samples, fields = one.samples(table, fold)
    assert sorted(samples.bare) == (sorted(fold.test) if transductive else [])
    assert one.plan() == replace(trial(facts).plan(), target_share=1.0 if masked else 0.5)
    network = one.network([field.size for field in fields]).eval()

    def predicted(changed, column):
        values = samples.rows.values.clone()
        values[changed, column] += 1.0
        rows = samples.rows._replace(values=values)
        return predict(network, replace(samples, rows=rows), one.plan(), fold.test[:1])

    before = predicted([], -1)
    assert torch.equal(predicted(fold.test, -1), before)  # no target of a test row is read
    assert torch.equal(predicted(fold.learned, -1), before) == masked
    assert torch.equal(predicted(fold.test[1:], -2), before) != transductive


@pytest.mark.parametrize("protocol", ["published", "inductive"])
def test_no_target_to_test_on_reaches_a_prediction(facts, protocol):
    _, fold, samples, fields = made(facts, protocol)
    one = trial(facts, protocol=protocol)
    network = one.network([field.size for field in fields]).eval()
    other = samples.rows.values.clone()
    other[fold.test, -1] = 99.0
    changed = replace(samples, rows=samples.rows._replace(values=other))
    found, again = (predict(network, given, one.plan(), fold.test) for given in (samples, changed))
    assert torch.equal(found, again)
    other[fold.learned, -1] = 99.0
    same = torch.equal(
        predict(network, replace(samples, rows=samples.rows._replace(values=other)), one.plan(), fold.test), found
    )
    assert same == (protocol == "published")  # there no target is ever seen; here those of the context are


def test_inductive_rows_are_told_one_by_one_and_published_ones_together(facts):
    for protocol in ("published", "inductive"):
        _, fold, samples, fields = made(facts, protocol)
        one = trial(facts, protocol=protocol)
        network = one.network([field.size for field in fields]).eval()
        values = samples.rows.values.clone()
        values[fold.test[1:], 5] += 3
        moved = replace(samples, rows=samples.rows._replace(values=values))
        pair = [predict(network, given, one.plan(), fold.test[:1]) for given in (samples, moved)]
        assert torch.equal(*pair) == (protocol == "inductive")


def test_settings_are_those_that_were_published_and_those_of_the_estimator():
    assert settings_of("breast", "published") | {"precision": None} == {
        "embedding": 32, "steps": 2000, "lr": 5e-4, "flat": 0.5, "precision": None,
    }  # fmt: skip
    ours = settings_of("boston", "inductive")
    assert (ours["embedding"], ours["steps"]) == (64, 2000)  # as published; the estimator's own are for a CPU
    plan = trial(({}, {"yacht": {"digest": ""}}), protocol="inductive", lr=None).plan()
    assert replace(plan, bf16=None) == Plan()
    with pytest.raises(ValueError, match="table of the published protocol"):
        settings_of("adult", "published")


# Corruption


class Told(TableNetwork):
    """A network that says nothing, and remembers what it was given."""

    def __init__(self):
        super().__init__((0,) * 4, 1, 1, 1)
        self.given = []

    def forward(self, values, codes, hidden, memories=None):
        self.given.append((values, codes, hidden, memories))
        return values

    def memories(self, tables):
        return tables

    def target(self, values):
        return values.sum(-1, keepdim=True)


def numbered(n, d):
    values = torch.arange(n * d, dtype=torch.float32).view(n, d)
    return Rows(values, values.long(), values % 5 == 0)


def test_every_column_of_all_other_rows_is_shuffled_by_itself_and_the_row_stays_as_it_is():
    rows, test = numbered(12, 4), np.array([3, 7, 11])
    stub = Told()
    samples = Samples(rows, np.arange(3), np.arange(0), np.arange(3, 12))
    found = predict_corrupted(stub, samples, Plan(target_share=1.0, published=True), test, seed=0)
    values, codes, hidden, _ = stub.given[0]
    assert found.flatten().tolist() == rows.values[test].sum(1).tolist()
    assert hidden[..., -1].all()
    for table, own in enumerate(test):
        assert torch.equal(values[table, -1], rows.values[own])
        others = torch.cat((rows.values[:own], rows.values[own + 1 :]))
        assert torch.equal(values[table, :-1].sort(0).values, others)  # of each column the same entries
        kept = values[table, :-1] // 4  # which row each entry is of
        assert not (kept == kept[:, :1]).all(1).any()  # no row is whole
    assert torch.equal(codes, values.long())  # an entry moves as one
    assert torch.equal(hidden[..., :-1], values[..., :-1] % 5 == 0)
    assert not torch.equal(values[0].sort(1).values, values[1].sort(1).values)


def test_a_context_is_shuffled_with_its_targets_anew_for_every_row():
    rows, test = numbered(12, 4), np.array([9, 10])
    stub = Told()
    predict_corrupted(stub, Samples(rows, np.arange(8), np.arange(8, 9), np.arange(0)), Plan(), test, seed=0)
    values, _, hidden, tables = stub.given[0]
    assert torch.equal(values[:, 0], rows.values[test])
    assert hidden[:, 0, -1].all()
    assert torch.equal(tables.values.sort(1).values, rows.values[:8].expand(2, -1, -1))
    assert not torch.equal(tables.values[0], tables.values[1])
    assert torch.equal(tables.hidden, tables.values % 5 == 0)


def test_shuffling_is_uniform():
    rows = numbered(3, 1)
    many = Rows(*(part.expand(6000, -1, -1) for part in rows))
    orders = shuffled(many, torch.Generator().manual_seed(0)).values[:, :, 0]
    counts = torch.unique(orders, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert (counts - 1000).abs().max() < 150


# Figures


def test_figures_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(50, 2)).round(1), rng.integers(0, 2, 50)
    likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = metrics_of(logits, truth)
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, logits[:, 1] - logits[:, 0]))
    assert found["nll"] == pytest.approx(metrics.log_loss(truth, likely))
    assert found["accuracy"] == metrics.accuracy_score(truth, logits.argmax(1))
    assert metrics_of(rng.normal(size=(5, 3)), np.arange(5) % 3)["auroc"] is None
    assert auroc(np.ones(3), np.ones(3, dtype=bool)) is None


@pytest.mark.parametrize(("kernel", "share"), [("symmetric", 1.0), ("skew", 0.0)])
def test_kernels_have_the_share_that_they_are_built_with(kernel, share):
    network = TableNetwork((0,) * 3, 8, 4, 2, kernel=kernel, column_kernel="general").eval()
    heads = row_heads(network, Rows(torch.randn(30, 3), torch.zeros(30, 3).long(), torch.zeros(30, 3).bool()))
    assert [(head["layer"], head["head"]) for head in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [head["symmetric"] for head in heads] == pytest.approx([share] * 4, abs=1e-6)
    assert [head["on_data"] for head in heads] == pytest.approx([share] * 4, abs=1e-4)
    assert network.encoder.layers[1].block.attention.kernel == "general"


@pytest.mark.parametrize("published", [False, True])
def test_heads_on_data_are_what_their_scores_are(published):
    network = TableNetwork((0,) * 3, 8, 2, 2, published=published).eval()
    rows = Rows(torch.randn(30, 3), torch.zeros(30, 3).long(), torch.zeros(30, 3).bool())
    found = row_heads(network, rows)
    block = network.encoder.layers[0].block
    with torch.no_grad():
        x = network.embed(rows.within()).flatten(2)
        normed = block.attention_norm(x)
        query = block.attention.queries(normed)[0]
        key = block.attention.memory(x if published else normed).key[0]
        scores = (query @ key.mT).double()
    scores = scores - scores.mean(1, keepdim=True)  # over queries
    scores = scores - scores.mean(2, keepdim=True)
    alike = (scores + scores.mT).square().sum((1, 2)) / (4 * scores.square().sum((1, 2)))
    assert [head["on_data"] for head in found] == pytest.approx(alike.tolist(), rel=1e-4)
    form = block.attention.form()
    assert [head["symmetric"] for head in found] == pytest.approx(((1 + form.symmetry) / 2).tolist())
