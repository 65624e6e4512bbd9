"""Trials of the study of primal attention on series, small: the data they get, what they change, and what they say."""

import gzip
import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import torch
from keyquery_studies.common.runner import Job, run_jobs
from keyquery_studies.primal.uea_series import (
    PUBLISHED,
    VARIANTS,
    SeriesTrial,
    decays,
    prepare_series,
    published_settings,
)
from torch.nn.functional import normalize

from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.layers import PrimalAttention
from keyquery.learn.series.training import Labelled, class_loss


def written(path, count, seed, labels=("down", "up"), dims=2):
    """A .ts file of slopes, of lengths 5 to 9."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        slope = np.linspace(-2, 2, rng.integers(5, 10)) * (1 if i % 2 else -1)
        values = [",".join(f"{v:.3f}" for v in slope + rng.normal(size=len(slope)) / 3) for _ in range(dims)]
        rows.append(":".join([*values, labels[i % 2]]))
    text = f"@dimensions {dims}\n@classLabel true down up\n@data\n" + "\n".join(rows)
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("study")
    written(source / "uea_Slopes_TRAIN.ts.xz", 20, seed=0)
    written(source / "uea_Slopes_TEST.ts", 10, seed=1)
    written(source / "Alone_TRAIN.ts", 4, seed=2)
    return folder, prepare_series(source, folder)


def trial(facts, **options):
    sizes = {"width": 16, "heads": 2, "depth": 2, "rank": 4, "epochs": 3, "attention": "primal+"}
    return SeriesTrial(**{"dataset": "Slopes", "digest": facts[0]["digest"], **sizes, **options})


def batch(count=3, n=12, dims=2, seed=0):
    values = torch.randn(count, n, dims, generator=torch.Generator().manual_seed(seed))
    real = torch.ones(count, n, dtype=torch.bool)
    real[0, 8:] = False
    return Labelled(Padded(values, real), torch.arange(count) % 2)


def test_pairs_of_files_are_found(study):
    folder, facts = study
    assert [(f["dataset"], f["train"], f["test"], f["classes"], f["dims"], f["length"]) for f in facts] == [
        ("Slopes", 20, 10, 2, 2, 9)
    ]
    assert prepare_series(None, folder) == facts
    assert sorted(path.name for path in folder.iterdir())[0] == f"Slopes-{facts[0]['digest']}.npz"


def test_only_sets_that_are_named_are_read(tmp_path):
    for name in ("A", "B"):
        written(tmp_path / f"{name}_TRAIN.ts", 8, seed=0)
        written(tmp_path / f"{name}_TEST.ts", 4, seed=1)
    (tmp_path / "B_TEST.ts").write_text("nothing")
    out = tmp_path / "out"
    assert [facts["dataset"] for facts in prepare_series(tmp_path, out, ["A"])] == ["A"]
    written(tmp_path / "B_TEST.ts", 4, seed=1)
    assert [facts["dataset"] for facts in prepare_series(tmp_path, out, ["B"])] == ["B"]
    assert [facts["dataset"] for facts in prepare_series(None, out)] == ["A", "B"]  # of both runs
    assert [facts["dataset"] for facts in prepare_series(None, out, ["B"])] == ["B"]
    for source in (tmp_path, None):
        with pytest.raises(ValueError, match="dataset must be one of 'A', 'B', got 'C'"):
            prepare_series(source, out, ["C"])


def test_other_data_have_another_digest(study, tmp_path):
    written(tmp_path / "Slopes_TRAIN.ts.gz", 20, seed=0)
    written(tmp_path / "Slopes_TEST.ts", 10, seed=1)
    assert prepare_series(tmp_path, tmp_path / "study") == study[1]  # packed otherwise, but the same
    written(tmp_path / "Slopes_TEST.ts", 10, seed=7)
    assert prepare_series(tmp_path, tmp_path / "study")[0]["digest"] != study[1][0]["digest"]


def test_what_cannot_be_used_is_told(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(NotADirectoryError, match=r"series must be a folder of \.ts files, got .*none"):
        prepare_series(tmp_path / "none", out)
    with pytest.raises(ValueError, match=r"series need a folder of .ts files: pass it as data \(--data\)"):
        prepare_series(None, out)
    written(tmp_path / "A_TRAIN.ts", 4, seed=0, labels=("up", "up"))
    with pytest.raises(ValueError, match=r"holds no pair of files NAME_TRAIN\.ts and NAME_TEST\.ts"):
        prepare_series(tmp_path, out)
    written(tmp_path / "A_TEST.ts", 4, seed=0)
    with pytest.raises(ValueError, match="A: the test file has classes that do not occur in training: down"):
        prepare_series(tmp_path, out)
    written(tmp_path / "A_TRAIN.ts", 4, seed=0, dims=1)
    with pytest.raises(ValueError, match="A: training has 1 dims, and test 2"):
        prepare_series(tmp_path, out)
    written(tmp_path / "uea_A_TEST.ts.xz", 4, seed=0)
    with pytest.raises(ValueError, match=r"A_TEST\.ts and uea_A_TEST\.ts\.xz are the same part of the same set"):
        prepare_series(tmp_path, out)


def test_published_settings():
    assert published_settings("UWaveGestureLibrary", "primal") == {"rank": 20, "eta": 0.0}
    assert published_settings("Handwriting", "primal+") == {"rank": 20, "eta": 0.5}
    assert published_settings("BasicMotions", "primal") == {"rank": 20, "eta": 0.1}
    assert published_settings("Handwriting", "general") == {"rank": 0, "eta": 0.0}
    assert len(PUBLISHED) == 10


def test_a_trial_is_a_job_that_is_done_once(study):
    folder, facts = study
    jobs = [trial(facts, attention=attention, seed=seed) for attention in ("primal", "general") for seed in (0, 1)]
    assert all(isinstance(job, Job) for job in jobs)
    assert len({job.name for job in jobs}) == 4
    rows = run_jobs(jobs, folder, "cpu")
    kept = folder / "results" / jobs[0].name
    kept.write_text(json.dumps({**rows[0], "seconds": -1.0}))
    assert run_jobs(jobs, folder, "cpu")[0]["seconds"] == -1
    again = jobs[1].run(folder, "cpu")
    assert {**again, "seconds": 0} == {**rows[1], "seconds": 0}
    assert replace(jobs[0], digest="other").name != jobs[0].name


@pytest.mark.slow
def test_protocols(study):
    folder, facts = study
    held = trial(facts, epochs=6).run(folder, "cpu")
    assert held["learned"] == 16
    assert len(held["curve"]) == 6
    assert held["curve"][held["best_epoch"] - 1] == max(held["curve"])
    shown = trial(facts, epochs=6, protocol="published").run(folder, "cpu")
    assert shown["learned"] == 20
    assert shown["accuracy"] == max(shown["curve"])  # chosen on the test data themselves
    assert shown["last_accuracy"] == shown["curve"][-1]


def test_the_head_flattens_tokens_or_stretches(study):
    _, facts = study
    assert trial(facts).network(2, 3, 9).classes.weight.shape == (3, 9 * 16)
    assert trial(facts, bins=4).network(2, 3, 9).classes.weight.shape == (3, 4 * 16)


@pytest.mark.slow
def test_it_learns(study):
    folder, facts = study
    assert trial(facts, epochs=30, attention="primal").run(folder, "cpu")["accuracy"] > 0.8


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_run(study, variant):
    folder, facts = study
    row = trial(facts, variant=variant, epochs=1).run(folder, "cpu")
    assert 0 <= row["accuracy"] <= 1
    for found in row["decay"].values():
        assert (found[1] is None) == (variant == "causal")
        assert sum(found[0]) == pytest.approx(1)
    json.dumps(row, allow_nan=False)


def test_variants_are_what_they_say(study):
    _, facts = study
    options = {"attention": "primal", "eta": 3.0}
    made = {name: trial(facts, variant=name, **options).network(2, 2, 9).eval() for name in VARIANTS}
    layers = {name: [m for m in net.modules() if isinstance(m, PrimalAttention)] for name, net in made.items()}
    assert {name for name in VARIANTS if layers[name][0].loss == "ksvd"} == {"ksvd"}
    assert {name for name in VARIANTS if layers[name][0].eta == 0} == {"no loss"}
    assert {name for name in VARIANTS if not layers[name][0].data_dependent} == {"data independent"}
    data = batch()
    entropy = torch.nn.functional.cross_entropy(made["no loss"](*data.data), data.target)
    assert torch.equal(class_loss(made["no loss"], data), entropy)
    assert class_loss(made["default"], data) > entropy
    with pytest.raises(ValueError, match="variant 'e only' needs primal attention, not 'general'"):
        trial(facts, attention="general", variant="e only")


def test_without_r_it_stays_without(study):
    _, facts = study
    network = trial(facts, variant="e only", attention="primal").network(2, 2, 9)
    optimiser, data = torch.optim.RAdam(network.parameters(), lr=0.01), batch()
    for _ in range(4):
        optimiser.zero_grad()
        class_loss(network, data).backward()
        optimiser.step()
    before = network.eval()(*data.data)
    for block in network.encoder.blocks:
        layer = block.attention
        assert (layer.concat.weight[:, :4] != 0).all()
        assert (layer.concat.weight[:, 4:] == 0).all()
        layer.wr.data.normal_()
    assert torch.equal(network(*data.data), before)


@pytest.mark.parametrize("attention", ["primal", "general"])
def test_a_causal_network_does_not_look_ahead(study, attention):
    _, facts = study
    network = trial(facts, variant="causal", attention=attention).network(2, 2, 9).eval()
    x, real = torch.randn(1, 12, 16), torch.ones(1, 12, dtype=torch.bool)
    changed = x.clone()
    changed[:, 8:] = torch.randn(1, 4, 16)
    assert torch.allclose(network.encoder(x, real)[:, :8], network.encoder(changed, real)[:, :8], atol=1e-6)


def test_decay_of_primal_layers_is_that_of_the_whole_kernel(study):
    _, facts = study
    network = trial(facts, attention="primal", depth=1).network(2, 2, 9).eval()
    data, seen = batch(), []
    layer = network.encoder.blocks[0].attention
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().double()))
    found = decays(network, data)
    hook.remove()
    expected = []
    for x, real in zip(seen[0], data.data.real, strict=True):
        x = x[real]
        both = (x @ layer.query_key.weight.double().T + layer.query_key.bias.double()).unflatten(-1, (2, 2, 8))
        for head in range(2):
            query, key = (normalize(both[:, side, head], dim=-1) for side in (0, 1))
            own = x.unflatten(-1, (2, 8))[:, head]  # 10·rank is above the length: every token is in f(X)
            values = torch.linalg.svdvals(query @ own.T @ own @ key.T)[:8]
            expected.append(values / values.sum())
    assert torch.allclose(torch.tensor(found[0]).double(), torch.stack(expected).mean(0), atol=1e-5)


def test_decay_of_softmax_layers(study):
    _, facts = study
    network = trial(facts, attention="general", depth=1).network(2, 2, 9)
    layer, data = network.encoder.blocks[0].attention, batch()
    assert network.training
    spread = decays(network, data)[0]
    assert network.training
    assert len(spread) == 12
    assert sum(spread) == pytest.approx(1)
    assert spread == sorted(spread, reverse=True)
    torch.nn.init.zeros_(layer.query.weight)
    torch.nn.init.zeros_(layer.query.bias)  # everyone attends to all alike: rank one
    assert decays(network, data)[0] == pytest.approx([1.0] + [0.0] * 11, abs=1e-6)
    network.encoder.is_causal = True
    rows = [torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None] for n in (8, 12, 12)]
    values = [torch.nn.functional.pad(torch.linalg.svdvals(row), (0, 12 - len(row))) for row in rows]
    expected = torch.stack([value / value.sum() for value in values]).mean(0)
    assert torch.allclose(torch.tensor(decays(network, data)[0]), expected, atol=1e-5)
