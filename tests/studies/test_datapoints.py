"""The study of attention between datapoints, small: tables, trainings, corruption, and what is made of the figures."""

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.estimators.datapoint_training import Plan as Training
from keyquery.estimators.datapoint_training import Samples
from keyquery.estimators.table_network import TableNetwork
from keyquery.estimators.tables import Rows
from keyquery.studies import DatapointStudy, baselines, tell_tables
from keyquery.studies import npt as trainings
from keyquery.studies.datapoints import Plan, over_folds
from keyquery.studies.jobs import Job, finish
from keyquery.studies.lookups import LookUp
from keyquery.studies.npt import TableTrial, samples_of, settings_of
from keyquery.studies.tabular import load_kept, prepare_tables, split_of
from keyquery.studies.tellers import auroc, figures, row_heads, shuffled, tell, tell_corrupted


def packed(path, text):
    path.write_bytes(lzma.compress(text.encode()))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Yacht and Boston as their files are, with other numbers: the target is of the last feature and of a category."""
    folder, rng = tmp_path_factory.mktemp("source"), np.random.default_rng(0)
    for name, features, named in (("yacht", 6, 5), ("boston", 13, 2)):
        codes, x = rng.integers(0, 3, (60, features)), rng.normal(size=60)
        rows = [
            [*map(float, code[: features - 1]), last, 10 * last + 5 * code[0]]
            for code, last in zip(codes, x, strict=True)
        ]
        packed(folder / f"uci_{name}_data.txt.xz", "".join(" ".join(f"{v:.4f}" for v in row) + "\n" for row in rows))
        assert named < features
    return folder


@pytest.fixture(scope="module")
def facts(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return folder, prepare_tables(source, folder, ["yacht"])


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


@pytest.mark.parametrize("protocol", ["published", "inductive"])
def test_no_target_to_test_on_reaches_a_prediction(facts, protocol):
    _, fold, samples, fields = made(facts, protocol)
    one = trial(facts, protocol=protocol)
    network = one.network([field.size for field in fields]).eval()
    other = samples.rows.values.clone()
    other[fold.test, -1] = 99.0
    changed = replace(samples, rows=samples.rows._replace(values=other))
    found, again = (tell(network, given, one.plan(), fold.test) for given in (samples, changed))
    assert torch.equal(found, again)
    other[fold.learned, -1] = 99.0
    same = torch.equal(
        tell(network, replace(samples, rows=samples.rows._replace(values=other)), one.plan(), fold.test), found
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
        pair = [tell(network, given, one.plan(), fold.test[:1]) for given in (samples, moved)]
        assert torch.equal(*pair) == (protocol == "inductive")


def test_settings_are_those_that_were_published_and_those_of_the_estimator():
    assert settings_of("breast", "published") | {"precision": None} == {
        "embedding": 32, "steps": 2000, "lr": 5e-4, "flat": 0.5, "precision": None,
    }  # fmt: skip
    usual = kq.NPTRegressor()
    ours = settings_of("boston", "inductive")
    assert (ours["embedding"], ours["steps"]) == (usual.embedding, usual.steps)
    plan = trial(({}, {"yacht": {"digest": ""}}), protocol="inductive", lr=None).plan()
    assert replace(plan, bf16=None) == Training()
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
    found = tell_corrupted(stub, samples, Training(target_share=1.0, published=True), test, seed=0)
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
    tell_corrupted(stub, Samples(rows, np.arange(8), np.arange(8, 9), np.arange(0)), Training(), test, seed=0)
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
    found = figures(logits, truth)
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, logits[:, 1] - logits[:, 0]))
    assert found["nll"] == pytest.approx(metrics.log_loss(truth, likely))
    assert found["accuracy"] == metrics.accuracy_score(truth, logits.argmax(1))
    assert figures(rng.normal(size=(5, 3)), np.arange(5) % 3)["auroc"] is None
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
        normed = (block.query_norm or block.attention_norm)(x)
        query = block.attention.queries(normed)[0]
        key = block.attention.memory(x if published else normed).key[0]
        scores = (query @ key.mT).double()
    scores = scores - scores.mean(1, keepdim=True)  # over queries
    scores = scores - scores.mean(2, keepdim=True)
    alike = (scores + scores.mT).square().sum((1, 2)) / (4 * scores.square().sum((1, 2)))
    assert [head["on_data"] for head in found] == pytest.approx(alike.tolist(), rel=1e-4)
    form = block.attention.form()
    assert [head["symmetric"] for head in found] == pytest.approx(((1 + form.symmetry) / 2).tolist())


# Trainings


def test_a_training_says_what_it_was_and_what_came_of_it(facts):
    row = trial(facts, steps=40).run(facts[0], "cpu")
    assert not row["partial"]
    assert (row["steps_run"], row["learned"], row["held"], row["test"]) == (40, 42, 12, 6)
    assert row["clean"]["rmse"] == pytest.approx(row["rmse"])
    assert row["corrupted"]["rmse"] > 0
    assert len(row["row_heads"]) == 2
    assert row["validation"] == min(validation for _, _, validation in row["curve"])
    assert json.loads(json.dumps(row)) == row


def test_a_trial_is_a_job_named_by_all_its_settings(facts):
    one = trial(facts)
    assert isinstance(one, Job)
    assert one.name == replace(one, deadline=5.0).name
    others = [{"fold": 1}, {"protocol": "published"}, {"kernel": "psd"}, {"steps": 13}, {"precision": "full"}]
    assert len({one.name, *(replace(one, **other).name for other in others)}) == 6


@pytest.mark.parametrize("protocol", ["published", "inductive"])
def test_a_training_that_is_broken_off_ends_as_if_it_had_not_been(facts, tmp_path, monkeypatch, protocol):
    source = facts[0] / f"yacht-{facts[1]['yacht']['digest']}.npz"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    whole = trial(facts, protocol=protocol).run(facts[0], "cpu")
    asked = iter([0.0] * 7 + [10.0] * 9)  # once before the training, once before its first step
    monkeypatch.setattr(trainings, "time", lambda: next(asked))
    one = trial(facts, protocol=protocol, deadline=5.0)
    broken = finish([one], tmp_path, "cpu")[0]
    assert (broken["partial"], broken["steps_run"]) == (True, 6)
    assert "rmse" not in broken
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    monkeypatch.setattr(trainings, "time", lambda: 0.0)
    found = finish([one], tmp_path, "cpu")[0]
    changing = ("seconds",)
    assert {k: v for k, v in found.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }
    assert not list((tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr(trainings, "train", None)
    assert finish([one], tmp_path, "cpu")[0] == found  # is done, and not done again


def test_what_begins_too_late_is_not_begun(facts, tmp_path):
    row = finish([trial(facts, deadline=1.0)], tmp_path, "cpu")[0]
    assert (row["partial"], row["steps_run"]) == (True, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table": "none"}, "table"),
        ({"fold": 10}, "fold"),
        ({"protocol": "usual"}, "protocol"),
        ({"precision": "short"}, "precision"),
        ({"heads": 3}, "heads must divide embedding"),
    ],
)
def test_bad_trials_are_refused(facts, given, message):
    with pytest.raises(ValueError, match=message):
        trial(facts, **given)


# The plan


def test_what_takes_longest_comes_first():
    facts = {
        name: {"digest": "", "rows": rows, "features": features}
        for name, rows, features in (("boston", 506, 13), ("yacht", 308, 6), ("concrete", 1030, 8), ("breast", 569, 30))
    }
    jobs = Plan(part="npt").trainings(facts, None)
    assert [(job.table, job.protocol) for job in jobs[:3]] == [("concrete", "published")] * 3
    folds = {(job.table, job.protocol): 0 for job in jobs}
    for job in jobs:
        folds[job.table, job.protocol] += 1
    counts = {"boston": 10, "yacht": 3, "concrete": 3, "breast": 10}
    assert folds == {(table, protocol): n for table, n in counts.items() for protocol in ("published", "inductive")}
    compared = Plan().compared(facts, None)
    assert len(compared) == 2 * 3 * 5
    assert {job.embedding for job in compared} == {32}


def test_large_tables_have_one_split_and_no_published_protocol_here():
    facts = {"adult": {"digest": "", "rows": 48842, "features": 14}}
    assert [(job.fold, job.protocol) for job in Plan(tables=("adult",)).trainings(facts, None)] == [(0, "inductive")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"part": "some"}, "part"),
        ({"tables": ("none",)}, "table"),
        ({"kernels": ("rbf",)}, "kernel"),
        ({"minutes": -1.0}, "minutes"),
        ({"precision": "short"}, "precision"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_plans_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Plan(**given)


# The study


@pytest.fixture(scope="module")
def study(source, tmp_path_factory):
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("out")
    plan = Plan(tables=("yacht", "boston"), folds=(0, 1), steps=6, embedding=8, depth=2, kernels=("general", "psd"))
    with pytest.MonkeyPatch.context() as patch:
        few = {"learning_rate": (0.1,), "max_leaf_nodes": (8,), "min_samples_leaf": (5,), "iterations": 20}
        patch.setattr(baselines, "BOOSTING", few)
        patch.setattr(baselines, "PERCEPTRON", {"hidden": ((8,),), "alpha": (1e-2,), "epochs": 20})
        yield tell_tables(source, out, plan, device="cpu"), out, plan


def test_it_has_every_part(study):
    reading, _, _ = study
    assert len(reading.npt) == 2 * 2 * 2
    assert len(reading.kernels) == 2 * 2
    assert len(reading.baselines) == 2 * 2 * 3
    assert len(reading.lookup) == 5
    assert {row["part"] for row in reading.summary()} == {"npt", "kernels", "baselines"}
    assert kq.Reading.load(reading.to_json()) == reading
    assert len(reading.records()) == 8 + 4 + 12 + 5


def test_what_is_done_is_not_done_again(study, source, monkeypatch):
    reading, out, plan = study
    for kind in (TableTrial, baselines.Baseline, LookUp):
        monkeypatch.setattr(kind, "run", lambda *given: pytest.fail("it was done again"))
    again = tell_tables(None, out, plan, device="cpu")  # the tables lie there, too
    assert (again.npt, again.kernels, again.baselines, again.lookup) == (
        reading.npt, reading.kernels, reading.baselines, reading.lookup,
    )  # fmt: skip


def test_runs_that_were_made_apart_are_joined(study):
    reading, _, _ = study
    halves = [
        DatapointStudy(npt=reading.npt[::2], kernels=[], baselines=reading.baselines, lookup=[]),
        DatapointStudy(npt=reading.npt[1::2], kernels=reading.kernels, baselines=[], lookup=reading.lookup),
    ]
    unfinished = {**reading.npt[0], "partial": True, "steps_run": 3}
    more = DatapointStudy(npt=[unfinished], kernels=[], baselines=[], lookup=[])
    joined = DatapointStudy.joined(more, *halves)
    assert (joined.npt, joined.kernels, joined.baselines, joined.lookup) == (
        reading.npt, reading.kernels, reading.baselines, reading.lookup,
    )  # fmt: skip
    assert joined.summary() == reading.summary()


def row(fold, rmse, spoilt, **more):
    heads = [{"layer": 0, "head": h, "symmetric": s, "on_data": 0.9, "at_start": {"symmetric": 0.5, "on_data": 0.7}}
             for h, s in enumerate((0.6, 0.8))]  # fmt: skip
    figures = {"rmse": rmse, "clean": {"rmse": rmse}, "corrupted": {"rmse": spoilt}, "row_heads": heads}
    return {"table": "boston", "protocol": "published", "kernel": "general", "part_of": "npt", "fold": fold,
            "name": str(fold), "partial": False, **figures, **more}  # fmt: skip


def test_the_summary_is_its_definition():
    rows = [row(0, 2.0, 3.0), row(1, 4.0, 4.5), {**row(2, 9.0, 9.0), "partial": True}]
    classes = [
        {"table": "breast", "model": "boosting", "part_of": "baselines", "name": "b", "fold": 0,
         "accuracy": 0.9, "auroc": 0.95, "nll": 0.2},
    ]  # fmt: skip
    reading = DatapointStudy(npt=rows, kernels=[], baselines=classes, lookup=[])
    ours, trees = reading.summary()
    assert (ours["folds"], ours["rmse"], ours["rmse_se"]) == (2, 3.0, 1.0)
    assert ours["grows"] == pytest.approx(3.75 / 3 - 1)
    assert ours["grows_se"] == pytest.approx(np.std([0.5, 0.125], ddof=1) / np.sqrt(2))
    assert ours["symmetric"] == pytest.approx(0.7)
    assert (ours["symmetric_at_start"], ours["on_data"], ours["on_data_at_start"]) == pytest.approx((0.5, 0.9, 0.7))
    assert (trees["accuracy"], trees["accuracy_se"], trees["rmse"], trees["grows"]) == (0.9, None, None, None)
    assert over_folds("nll", [0.1, None]) == {"nll": None, "nll_se": None}


def test_of_classes_the_accuracy_that_is_lost_counts():
    lost = [{**row(0, 1.0, 1.0), "clean": {"accuracy": 0.9}, "corrupted": {"accuracy": 0.8}}]
    found = DatapointStudy(npt=lost, kernels=[], baselines=[], lookup=[]).summary()[0]
    assert found["grows"] == pytest.approx(0.1)


def test_it_needs_data_or_what_an_earlier_run_left(tmp_path):
    with pytest.raises(FileNotFoundError, match="'yacht' needs uci_yacht_data"):
        tell_tables(None, tmp_path / "out", Plan(part="npt", tables=("yacht",)))
    with pytest.raises(NotADirectoryError, match="data must be a folder"):
        tell_tables(tmp_path / "none", tmp_path / "out", Plan(part="npt", tables=("yacht",)))


def test_baselines_say_that_they_need_scikit_learn(monkeypatch, source, tmp_path):
    monkeypatch.setattr("keyquery.studies.baselines.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="--part npt"):
        tell_tables(source, tmp_path, Plan(part="baselines", tables=("yacht",)))
