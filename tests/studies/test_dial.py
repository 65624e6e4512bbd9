"""The study of the dial: its sequences, what it measures, and that a row is what a dial does."""

import pytest
import torch
from keyquery_studies import dial as module
from keyquery_studies.common.subjects import Material
from keyquery_studies.dial import NOTHING, measured, sequences

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.instruments.ablation.losses import next_token_loss
from keyquery.learn.data import read_corpus, unwrap

TALE = unwrap(read_corpus(kq.models.TEXT))


@pytest.fixture(scope="module")
def material():
    return Material({"tale": TALE}, Tokenizer.load(kq.models.DECODER), True, 4096)


def test_windows_for_means_are_of_other_text_and_enough_for_means_by_position(material):
    ids, targets = sequences("next token", material, "tale", 4, 256, False)
    others, _ = sequences("next token", material, "tale", 64, 256, True)
    assert len(others) >= 32
    assert not {tuple(row) for row in ids.tolist()} & {tuple(row) for row in others.tolist()}
    assert torch.equal(targets[:, :-1], ids[:, 1:])
    assert (targets[:, -1] == NOTHING).all()


def test_random_tokens_come_twice_and_the_second_half_is_asked_for(material):
    ids, targets = sequences("repeated tokens", material, "3", 5, 16, False)
    start = len(material.before)
    half = (ids.shape[1] - start) // 2
    assert torch.equal(ids[:, start : start + half], ids[:, start + half :])
    assert all(len(set(row.tolist())) == half for row in ids[:, start + half :])
    asked = targets != NOTHING
    assert asked.nonzero()[:, 1].unique().tolist() == list(range(start + half, start + 2 * half - 1))
    assert not torch.equal(ids, sequences("repeated tokens", material, "3", 5, 16, True)[0])


def test_hidden_words_are_the_targets(material):
    ids, targets = sequences("masked words", material, "tale", 4, 32, False)
    hidden = targets != NOTHING
    assert 0.05 < float(hidden.double().mean()) < 0.3
    assert (ids[hidden] == material.mask).all()
    plain, _ = sequences("next token", material, "tale", 4, 32, False)
    assert torch.equal(torch.where(hidden, targets, ids), plain)


def test_losses_and_accuracies_are_those_of_each_sequence(material):
    model = module.Subject.load(kq.models.DECODER, "cpu").model
    ids, targets = sequences("next token", material, "tale", 18, 16, False)
    loss = next_token_loss(model, {"input_ids": ids})
    assert torch.allclose(measured(model, "next token", ids, targets), loss.double(), atol=1e-5)
    with torch.no_grad():
        right = (model(ids).argmax(-1)[:, :-1] == ids[:, 1:]).double().mean(1)
    assert torch.allclose(measured(model, "copying", ids, targets), right)


def test_a_row_is_what_a_dial_does_about_means_of_other_sequences(study, material, monkeypatch):
    monkeypatch.setattr(module, "OTHERS", 32)
    reading = study("dial", kq.models.DECODER, "--text", kq.models.TEXT, "--sequences", 2, "--length", 16)
    rows = {(row["ability"], row["part"], row["means"]): row for row in reading.rows}
    assert {ability for ability, _, _ in rows} == {"next token", "repeated tokens", "copying"}
    # Without rotary positions, scores about global means have no position part.
    assert len(rows) == 3 * (6 + 4)
    assert max(abs(row["change"]) for row in reading.rows if row["part"] == "none") < 1e-5
    model = module.Subject.load(kq.models.DECODER, "cpu").model
    ids = sequences("next token", material, "tale", 2, 16, False)[0]
    others = sequences("next token", material, "tale", 32, 16, True)[0]
    with torch.no_grad(), kq.dial(model, popularity=0, data=[{"input_ids": others}], means="position"):
        value = float(next_token_loss(model, {"input_ids": ids}).mean())
    assert rows["next token", "popularity", "data"]["value"] == pytest.approx(value, abs=1e-5)
    assert {row["sources"] for row in reading.summary()} == {1}


def test_models_and_texts_must_have_distinct_names():
    with pytest.raises(ValueError, match="texts must have distinct names"):
        module.Dial(models=(kq.models.DECODER,), texts=(kq.models.TEXT, kq.models.TEXT)).run(None, "cpu")
