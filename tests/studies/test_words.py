"""The study of words: what is planted, what is counted, and what is made of both."""

import io

import numpy as np
import pytest
import torch
from keyquery_studies.common import language_models as language
from keyquery_studies.words import masked_words as blanked
from keyquery_studies.words import planted_models as planted
from keyquery_studies.words.masked_words import Blanks, counting, rank_metrics
from keyquery_studies.words.planted_models import PlantedTraining, plant
from keyquery_studies.words.study import Plan, WordsStudy
from keyquery_studies.words.study import run as run_words
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.instruments.look.corpus import NAMES
from keyquery.layers import LanguageModel, Shape
from keyquery.pages import terminal

SIZE = 40


@pytest.fixture
def folder(tmp_path):
    """Token i is followed by i + 1 most of the time."""
    rng = np.random.default_rng(0)
    steps = np.where(rng.random(20_000) < 0.8, 1, rng.integers(2, SIZE, 20_000))
    ids = (2 + np.cumsum(steps) % (SIZE - 2)).astype(np.int64)
    for name in ("tokens.npy", "blanks.npy"):
        np.save(tmp_path / name, ids)
    return tmp_path


def model_of(causal=True):
    torch.manual_seed(0)
    return LanguageModel(Shape(vocab_size=SIZE, width=32, depth=1, num_attention_heads=2, length=16, causal=causal))


def on_tokens(model):
    """The sum over heads of the first layer's scores between tokens, and of what they carry to the logits."""
    block = model.body.blocks[0]
    x = torch.nn.functional.layer_norm(model.tokens.weight[2:].double(), (32,))
    form, carried = block.attention.form().sum(), block.attention.output_form().sum()
    return x @ form.dense().double() @ x.mT, x @ carried.dense().double().mT @ x.mT


def alike(a, b):
    a, b = (part - part.mean() for part in (a.flatten(), b.flatten()))
    return float((a @ b / (a.norm() * b.norm())).detach())


def test_planted_heads_look_back_and_carry_what_follows(folder):
    after = planted.counted(folder, 2).dense("ppmi")[2:, 2:]
    model = model_of()
    before = model.body.blocks[0].attention
    sizes = before.form().norm2.clone(), before.output_form().norm2.clone()
    assert max(abs(alike(part, after)) for part in on_tokens(model)) < 0.2
    plant(model, folder, 2, depth=3, order=None)
    scores, carried = on_tokens(model)
    assert alike(scores, after.mT) > 0.8
    assert alike(carried, after) > 0.8
    now = model.body.blocks[0].attention
    assert now.form().norm2.allclose(sizes[0])  # as large as at random
    assert now.output_form().norm2.allclose(sizes[1])
    assert float(model.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_less_is_planted_where_less_is_asked_for(folder):
    models = [model_of(causal=False) for _ in range(4)]
    for depth, model in enumerate(models):
        if depth:
            plant(model, folder, 2, depth, None)
    for part, since in (("tokens", 1), ("body.blocks.0.attention.key", 2), ("body.blocks.0.attention.value", 3)):
        weights = [model.get_submodule(part).weight for model in models]
        assert [not weight.equal(weights[0]) for weight in weights] == [depth >= since for depth in range(4)]
    near = planted.counted(folder, 2).symmetric().dense("ppmi")[2:, 2:]
    assert alike(on_tokens(models[2])[0], near) > 0.8


def test_shuffled_words_have_the_same_spectrum_and_say_nothing(folder):
    model = model_of()
    order = torch.cat((torch.arange(2), 2 + torch.randperm(SIZE - 2, generator=torch.Generator().manual_seed(1))))
    plant(model, folder, 2, 3, order)
    assert abs(alike(on_tokens(model)[0], planted.counted(folder, 2).dense("ppmi")[2:, 2:].mT)) < 0.2


def test_every_start_is_another_training(folder):
    names = {
        PlantedTraining(objective="next token", start=start, seed=0, steps=1, text="", vocabulary=SIZE).name
        for start in planted.STARTS
    }
    assert len(names) == len(planted.STARTS)


def test_ranks_are_from_one_with_ties_in_the_middle():
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    found = rank_metrics(scores, torch.tensor([2, 0]))
    assert found == {"median": 2.0, "reciprocal": pytest.approx((1 / 3 + 1 / 2) / 2), "ten": 1.0}


def test_counting_knows_what_follows_what(folder, monkeypatch):
    """Before and after, naive Bayes finds the token between two; the projection is the published one."""
    monkeypatch.setattr(blanked, "COUNT", 60)
    counts, blanks = blanked.learned_from(folder, SIZE, 2), Blanks.of(folder, 0)
    found = counting(counts, blanks)
    assert rank_metrics(found["directed"], blanks.truth)["median"] <= 2
    assert rank_metrics(found["unigram"], blanks.truth)["median"] > 10
    near = counts.symmetric()
    for way, normed in (("published", False), ("normed", True)):
        expected = torch.tensor(near.project(blanks.context[7], normed=normed).e)
        assert found[way][7].allclose(expected, rtol=1e-4)


def rows(start, reached, objective="next token"):
    """A training whose loss falls by one a step, and is 5 at a step."""
    return [
        {"objective": objective, "start": start, "seed": seed, "steps": 8, "loss": 1.0}
        | {"curve": [[step, 5.0 + at - step] for step in range(9)]}
        for seed, at in enumerate(reached)
    ]


def test_steps_saved_are_counted_seed_by_seed():
    trainings = [*rows("random", (6, 6)), *rows("values", (3, 5)), *rows("shuffled", (6, 9))]
    study = WordsStudy(ranks=[], trainings=trainings, heads=[], symmetry={})
    assert study.goals() == {"next token": 5.0}
    found = {row["start"]: row for row in study.starts()}
    assert found["values"]["reached"] == 4
    assert found["values"]["saved"].change == 2
    assert found["shuffled"]["saved"] is None  # one never comes so far


@pytest.mark.slow
def test_the_study_runs_and_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(language, "EXAM", 8)
    monkeypatch.setattr(blanked, "COUNT", 10)
    rng = np.random.default_rng(0)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(rng.choice([chr(97 + i) * 2 for i in range(26)], 40_000)))
    options = ["--steps", "2", "--seed", "0", "--vocabulary", "270", "--device", "cpu", "--out", str(tmp_path / "out")]
    found = tmp_path / "words.json"
    result = CliRunner().invoke(
        cli.app,
        ["study", "words", "--data", str(text), *options, "--json", str(found), "--picture", str(tmp_path / "w.svg")],
    )
    assert result.exit_code == 0, result.output
    study = kq.Reading.load(found)
    assert len(study.trainings) == len(planted.STARTS)
    assert {row["way"] for row in study.ranks} >= {"unigram", "published", "Transformer"}
    assert {row["model"] for row in study.heads} == {"encoder", "decoder"}
    assert len(study.beside()) == 8  # two models of four layers
    again = CliRunner().invoke(cli.app, ["study", "words", *options, "--json", str(tmp_path / "again.json")])
    assert again.exit_code == 0, again.output
    assert kq.Reading.load(tmp_path / "again.json").trainings == study.trainings


def test_tables_show_what_was_found():
    ranks = [
        {"way": way, "seed": seed, "median": at, "reciprocal": 1 / at, "ten": 0.5}
        for way, at in (("unigram", 100), ("directed", 20))
        for seed in (0, 1)
    ]
    figures = {f"{name}{control}": 0.1 for name in NAMES for control in ("", "_chance", "_random")}
    heads = [{"model": "encoder", "layer": 0, "head": 0, **figures, "skew_cosine": -0.2}]
    trainings = [*rows("random", (6, 6)), *rows("values", (3, 5))]
    study = WordsStudy(ranks=ranks, trainings=trainings, heads=heads, symmetry={"ppmi": 0.25})
    out = io.StringIO()
    terminal.show(study, Console(file=out, width=100))
    assert "unigram frequency" in out.getvalue()
    assert "+2 (" in out.getvalue()
    assert "-0.20" in out.getvalue()
    assert study.plot() is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seeds": ()}, "seeds must name at least one"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"objectives": ("mask",)}, "objective must be one of"),
    ],
)
def test_plans_that_are_none_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Plan(**options)


@pytest.mark.parametrize("out", [None, "out"])
def test_without_data_there_must_be_tokens(tmp_path, out):
    with pytest.raises(ValueError, match="data must be a text file"):
        run_words(None, None if out is None else tmp_path / out, kq.models.ENCODER)
