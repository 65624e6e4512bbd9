"""Stacked arena models against single ones, and against the released layer's equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from keyquery_studies.common.stacked import stacked
from keyquery_studies.primal import text as module
from keyquery_studies.primal.model import Classifier, published_regularizer
from keyquery_studies.primal.stacked import STACKED, _released, _sampled, initial, losses, samples_padding
from keyquery_studies.primal.study import SAMPLINGS, SIDES, Primal
from keyquery_studies.primal.text import TextRun, TextTraining, accuracy, prepare_texts
from torch import nn
from torch.nn.functional import cross_entropy

import keyquery as kq
from tests.studies.primal.test_series import written

LENGTHS = (30, 17, 3)


def padded(seed: int) -> torch.Tensor:
    tokens = torch.randint(1, 256, (3, 40), generator=torch.Generator().manual_seed(seed))
    return tokens * (torch.arange(40) < torch.tensor(LENGTHS).unsqueeze(1))


@pytest.mark.parametrize("attention", ["general", "primal"])
def test_stacked_models_equal_single_ones(attention: str) -> None:
    primal = None if attention == "general" else {"rank": 4, "eta": 0.05}
    starts = [initial(attention, seed, (256, 40, 2), primal) for seed in range(2)]
    weights = {name: torch.stack([own[name] for own in starts]).requires_grad_() for name in starts[0]}
    tokens, labels = torch.stack([padded(seed) for seed in range(2)]), torch.tensor([[0, 1, 1], [1, 0, 1]])
    values, logits = losses(weights, attention, 0.05, tokens, labels, training=False)
    values.sum().backward()
    for seed, start in enumerate(starts):
        model = Classifier(attention, 256, 40, 2, primal)
        model.load_state_dict(start)
        for part in model.modules():  # in training mode, which the regularizer needs, but without dropout
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0
        single = model(tokens[seed], tokens[seed] > 0)
        value = cross_entropy(single, labels[seed]) + published_regularizer(model)
        value.backward()
        torch.testing.assert_close(logits[seed], single)
        torch.testing.assert_close(values[seed], value)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weights[name].grad[seed], weight.grad)


def test_texts_cut_by_groups_give_the_same_losses_and_gradients() -> None:
    weights = stacked([initial("general", seed, (256, 40, 2), None) for seed in range(2)], "cpu")
    tokens, labels = torch.stack([padded(seed) for seed in range(2)]), torch.tensor([[0, 1, 1], [1, 0, 1]])
    results = []
    for cuts in ((), (3, 17, 30)):
        values, logits = losses(weights, "general", 0.0, tokens, labels, training=False, cuts=cuts)
        gradients = torch.autograd.grad(values.sum(), list(weights.values()))
        results.append([values, logits, *gradients])
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, whole)


def texts(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of one letter that repeats, of any length; the letter is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    real = torch.arange(24) < torch.randint(2, 25, (count, 1), generator=generator)
    return ((97 + labels)[:, None] * real).to(torch.uint8), labels.to(torch.uint8)


@pytest.mark.parametrize("attention", SIDES)
def test_a_training_ends_when_no_model_improves(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 5)
    monkeypatch.setattr(module, "PATIENCE", 2)
    splits = {
        name: texts(count, seed)
        for seed, (name, count) in enumerate({"train": 64, "validation": 32, "test": 32}.items())
    }
    options = {"attention": attention, "data": "", "lr": 3e-3, "length": 24, "steps": 400, "batch": 8}
    runs = [TextRun(seed=seed, **options) for seed in (0, 1)]
    rows = TextTraining(runs, splits, "cpu").train()
    for row in rows:
        assert row["ended"] == "validation"
        assert row["accuracy"] == 1.0
        assert row["validation"] == 0.0
    last = max(row["best_step"] for row in rows)
    assert {row["steps_run"] for row in rows} == {last + 10}


@pytest.mark.parametrize("attention", STACKED)
def test_accuracy_of_cut_texts_is_that_of_whole_ones(attention: str) -> None:
    run = TextRun(attention=attention, seed=0, data="", length=64, batch=4)
    primal = None if attention == "general" else {"rank": 1, "eta": 0.05}  # 10 of 64 tokens are sampled
    models = 8
    weights = stacked([initial(attention, seed, (256, 64, 2), primal) for seed in range(models)], "cpu")
    generator = torch.Generator().manual_seed(0)
    real = torch.arange(64) < torch.randint(4, 40, (40, 1), generator=generator)
    tokens = torch.randint(1, 256, (40, 64), generator=generator) * real
    labels = torch.zeros(40, dtype=torch.long)
    inputs = tokens.expand(models, -1, -1), labels.expand(models, -1)
    _, logits = losses(weights, attention, 0.0, *inputs, training=False)
    torch.testing.assert_close(accuracy(run, weights, (tokens, labels)), (logits.argmax(-1) == labels).float().mean(1))


def test_released_layer_by_its_equations() -> None:
    """Token by token, for one sequence and head after head; padding is not masked."""
    torch.manual_seed(0)
    whole = initial("released", 0, (256, 12, 2), {"rank": 3, "eta": 0.1})
    prefix = "body.blocks.0.attention."
    own = {name.removeprefix(prefix): weight for name, weight in whole.items() if name.startswith(prefix)}
    x, mask = torch.randn(12, 64), torch.arange(12) < 5
    out, error = _released({k: v.unsqueeze(0) for k, v in own.items()}, x.unsqueeze(0), mask[None, None])
    query, key = (x @ own["query_key.weight"].T + own["query_key.bias"]).chunk(2, -1)
    outputs, energies, traces = [], [], []
    for head in range(2):
        columns = slice(32 * head, 32 * head + 32)
        pair = []
        for vectors, directions in ((query, own["directions"][0]), (key, own["directions"][1])):
            unit = vectors[:, columns] / vectors[:, columns].norm(dim=-1, keepdim=True)
            kept = [int(i * 11 / 11) for i in range(12)]  # min(10 · rank, 12) tokens, evenly spaced
            pair.append(unit @ (x[kept][:, columns].T @ directions[head, :12]))
        outputs.append(torch.cat(pair, -1) @ own["concat.weight"].T + own["concat.bias"])
        root = own["log_lambda"][head]
        energies.append(sum((root**2 * score**2).sum(-1).mean() for score in pair))
        traces.append((own["directions"][0, head, :12] * own["directions"][1, head, :12]).sum())
    torch.testing.assert_close(out[0], torch.cat(outputs, -1) @ own["output.weight"].T + own["output.bias"])
    expected = ((energies[0] + energies[1]) / 4 - (traces[0] + traces[1]) / 2) ** 2
    torch.testing.assert_close(error[0], expected)


@pytest.mark.parametrize(("variant", "usual"), [(name, name.split(",")[0]) for name in SAMPLINGS])
def test_variants_differ_in_where_tokens_are_sampled_alone(variant: str, usual: str) -> None:
    """Without padding they sample the same tokens, with padding others."""
    primal = {"rank": 1, "eta": 0.05}  # 10 rows
    weights = stacked([initial(usual, seed, (256, 20, 2), primal) for seed in range(2)], "cpu")
    labels = torch.tensor([[0, 1, 1], [1, 0, 1]])
    full = torch.randint(1, 256, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    for tokens, same in ((full, True), (full * (torch.arange(20) < 11), False)):
        one, other = (losses(weights, name, 0.05, tokens, labels, training=False) for name in (variant, usual))
        assert all(torch.allclose(a, b) for a, b in zip(one, other, strict=True)) is same
    real = torch.arange(20) < 11
    own = {name.removeprefix("body.blocks.0.attention."): weight for name, weight in weights.items()}
    x = torch.randn(2, 60, 64)
    sample, used = _sampled(own, x, real.expand(2, 3, 20), everywhere=samples_padding(variant))
    places = [row * 19 // 9 for row in range(10)] if samples_padding(variant) else [row * 10 // 9 for row in range(10)]
    assert used.tolist() == [[place < 11 for place in places]] * 6
    assert torch.equal(sample[0], x[0, places])


def test_start_of_the_released_layer() -> None:
    weights = initial("released", 0, (256, 40, 2), {"rank": 20, "eta": 0.1})
    directions = weights["body.blocks.0.attention.directions"]
    flat = directions.flatten(2)
    torch.testing.assert_close(flat @ flat.mT, torch.eye(2).expand(2, 2, 2), atol=1e-5, rtol=0)  # heads are orthogonal
    assert directions.norm(dim=2).mean().item() == pytest.approx(20**-0.5, rel=0.05)


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """Texts of one letter, by their label; more than 2,500 to train on."""
    rows = [("train" if i < 2600 else "test", i % 2, "ab"[i % 3 % 2] * 4) for i in range(2620)]
    lines = [f"{split}\t{label}\t{text}" for split, label, text in rows]
    folder = tmp_path / "films"
    folder.mkdir()
    (folder / "films.tsv").write_text("split\tlabel\ttext\n" + "\n".join(lines) + "\n")
    return folder


def test_texts_are_bytes_with_a_validation_split(films: Path, tmp_path: Path) -> None:
    facts = prepare_texts(films / "films.tsv", tmp_path / "kept")
    assert facts["examples"] == [100, 2500, 20]
    splits = module.load_texts(tmp_path / "kept" / f"texts-{facts['digest']}.npz", 6, "cpu")
    tokens, labels = splits["test"]
    assert tokens.shape == (20, 6)
    assert labels.tolist() == [0, 1] * 10
    assert bytes(tokens[0].tolist()) in (b"aaaa\0\0", b"bbbb\0\0")
    assert prepare_texts(None, tmp_path / "kept") == facts
    with pytest.raises(ValueError, match="texts need a"):
        prepare_texts(None, tmp_path / "none")


@pytest.mark.slow
def test_texts_are_compared_at_the_best_rates(study: Any, films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyquery_studies.common.rates.EXTENSIONS", 0)
    options = ["--part", "text", "--seed", 0, "--seed", 1, "--length", 8, "--steps", 2, "--batch", 8]
    reading = study("primal", "--data", films, *options)
    arms = {name: [row for row in reading.text if row["attention"] == name] for name in SIDES}
    for name, own in arms.items():
        (rate,) = [row["lr"] for row in own if row["seed"] == 1]
        tried = {row["lr"]: row["validation"] for row in own if row["seed"] == 0}
        assert len(tried) == 3
        assert tried[rate] == min(tried.values())
        arms[name] = [row for row in own if row["lr"] == rate]
    gap = reading.contrasts()[0]
    assert (gap["attention"], gap["less"], gap["seeds"]) == ("primal", "general", 2)
    means = [sum(row["accuracy"] for row in arms[name]) / 2 for name in ("primal", "general")]
    assert gap["change"] == pytest.approx(means[0] - means[1])


def test_series_are_run_by_every_attention_under_both_protocols(study: Any, tmp_path: Path) -> None:
    for seed, part in enumerate(("TRAIN", "TEST")):
        written(tmp_path / f"Waves_{part}.ts", 10, seed)
    options = ["--part", "series", "--dataset", "Waves", "--seed", 0, "--width", 16, "--epochs", 1]
    reading = study("primal", "--data", tmp_path, *options)
    assert len({(row["attention"], row["protocol"]) for row in reading.series}) == len(reading.series) == 6
    assert [row["part"] for row in reading.summary()] == ["series"] * 6
    with pytest.raises(ValueError, match="part must be one of 'series', 'text', 'all', got 'arena'"):
        Primal(part="arena").run(None, "cpu")


def test_sampling_is_compared_after_as_many_steps() -> None:
    """The figures of the page that no table has."""
    study = kq.Reading.load(Path("docs/studies/primal.json"))
    best = {
        name: [
            max(right for step, _, right in row["curve"] if step <= 4000)
            for row in study.text
            if (row["attention"], row["length"]) == (name, 4096) and row["seed"] < 3
        ]
        for name in ("released", "released, sampling real tokens")
    }
    assert [len(own) for own in best.values()] == [3, 3]
    most, least = max(best["released, sampling real tokens"]), min(best["released"])
    said = f"at most {100 * most:.1f}, released at least {100 * least:.1f}"
    assert said in Path("docs/studies/primal.md").read_text()
