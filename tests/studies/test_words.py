"""The study of words: ranks of masked tokens by counts and by a Transformer."""

import numpy as np
import pytest
import torch
from keyquery_studies import words as module
from keyquery_studies.words import WordsStudy, counting, held_out, learned_from, rank_metrics

SIZE = 40


@pytest.fixture
def folder(tmp_path):
    """Token i is followed by i + 1 most of the time."""
    rng = np.random.default_rng(0)
    steps = np.where(rng.random(20_000) < 0.8, 1, rng.integers(2, SIZE, 20_000))
    np.save(tmp_path / "blanks.npy", (2 + np.cumsum(steps) % (SIZE - 2)).astype(np.int64))
    return tmp_path


def test_ranks_are_from_one_with_ties_in_the_middle():
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    metrics = rank_metrics(scores, torch.tensor([2, 0]))
    assert metrics == {"median": 2.0, "reciprocal": pytest.approx((1 / 3 + 1 / 2) / 2), "ten": 1.0}


def test_counting_knows_what_follows_what(folder, monkeypatch):
    """Before and after, naive Bayes finds the token between two; the projection is that of `kq`."""
    monkeypatch.setattr(module, "COUNT", 60)
    counts, texts = learned_from(folder, SIZE, 2), held_out(folder, 0)
    scores, truth = counting(counts, texts), texts[:, module.WIDE]
    assert rank_metrics(scores["directed"], truth)["median"] <= 2
    assert rank_metrics(scores["unigram"], truth)["median"] > 10
    near, middle = counts.symmetric(), module.WIDE
    context = torch.cat((texts[7, middle - 8 : middle], texts[7, middle + 1 : middle + 9]))
    projection = near.project(context)
    assert scores["published"][7].allclose(torch.tensor(projection.e).float(), rtol=1e-4)
    normed = torch.tensor(projection.norm).double().mean(0) @ near.dense()[context].double()
    assert scores["normed"][7].allclose(normed.float(), rtol=1e-4)


def test_steps_saved_are_counted_seed_by_seed():
    trainings = [
        {"objective": "next token", "start": start, "seed": seed, "steps": 8, "loss": 1.0}
        | {"curve": [[step, 5.0 + reached - step] for step in range(9)]}  # falls by one per step, and is 5 there
        for start, steps in {"random": (6, 6), "values": (3, 5), "shuffled": (6, 9)}.items()
        for seed, reached in enumerate(steps)
    ]
    study = WordsStudy(ranks=[], trainings=trainings, symmetry={})
    assert study.goals() == {"next token": 5.0}
    starts = {row["start"]: row for row in study.starts()}
    assert starts["values"]["reached"] == 4
    assert starts["values"]["saved"].change == 2
    assert starts["shuffled"]["saved"] is None  # one never comes so far


@pytest.mark.slow
def test_the_study_ranks_by_every_method(study, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COUNT", 10)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice([chr(97 + i) * 2 for i in range(26)], 40_000)))
    reading = study("words", "--data", text, "--seed", 0, "--window", 2)
    assert [row["way"] for row in reading.ranks][-2:] == ["Transformer", "Transformer, more"]
    assert len(reading.summary()) == 9


def test_without_data_there_must_be_tokens(tmp_path):
    for out in (None, tmp_path):
        with pytest.raises(ValueError, match="data must be a text file"):
            module.Words().run(out, "cpu")
