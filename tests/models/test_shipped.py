"""What ships: sizes, cards, and that the two differ in nothing but the objective."""

import json

import pytest
import torch

import keyquery as kq
from keyquery.layers import LanguageModel
from keyquery.listening.inputs.load import load_model

FOLDERS = (kq.models.ENCODER, kq.models.DECODER)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_weights_are_small_and_whole(folder):
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
    model, tokenizer = load_model(folder)
    assert isinstance(model, LanguageModel)
    assert sum(weight.numel() for weight in model.parameters()) == 1_350_400
    assert len(tokenizer) == model.config.vocab_size == 4096
    assert (model.config.depth, model.config.width, model.config.length) == (4, 128, kq.models.LENGTH)


def test_they_differ_only_in_the_objective():
    first, second = (json.loads((folder / "config.json").read_text()) for folder in FOLDERS)
    assert {key for key in first if first[key] != second[key]} == {"causal"}
    first, second = (json.loads((folder / "log.json").read_text()) for folder in FOLDERS)
    assert first["recipe"] == second["recipe"]
    assert (first["objective"], second["objective"]) == ("masked", "next token")
    assert (FOLDERS[0] / "tokenizer.json").read_bytes() == (FOLDERS[1] / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_cards_say_what_it_was_trained_on(folder):
    card = (folder / "README.md").read_text()
    assert "public domain" in card
    assert "keyquery study objectives" in card
    log = json.loads((folder / "log.json").read_text())
    assert f"{log['loss']:.3f}" in card
    assert log["log"][-1]["step"] == log["recipe"]["steps"]


def predictions(folder, text, hidden):
    """What the model says for the token at `hidden`, and what stands there."""
    model, tokenizer = load_model(folder)
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        if model.config.causal:
            return model(ids)[0, hidden - 1].log_softmax(-1), ids[0, hidden]
        masked = ids.clone()
        masked[0, hidden] = tokenizer.mask_token_id
        return model(masked)[0, hidden].log_softmax(-1), ids[0, hidden]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.slow
def test_both_have_learned_their_objective(folder):
    text = kq.models.TEXT.read_text()[:900]
    chances = []
    for hidden in range(20, 60, 4):
        logs, truth = predictions(folder, text, hidden)
        chances.append(logs[truth].item())
    assert sum(chances) / len(chances) > -5.5  # a uniform guess is −8.3


def test_the_decoder_does_not_look_ahead():
    model, tokenizer = load_model(kq.models.DECODER)
    ids = torch.tensor([tokenizer.encode("The captain gave the letter to his daughter")])
    other = ids.clone()
    other[0, -1] = 77
    with torch.no_grad():
        assert torch.equal(model(ids)[0, :-1], model(other)[0, :-1])


def test_its_heads_are_read_from_disk_as_they_run():
    """The scores of the running model's first layer equal those of the Form in the file."""
    model, tokenizer = load_model(kq.models.ENCODER)
    layer = kq.read(kq.models.ENCODER)[0]
    ids = torch.tensor([tokenizer.encode("The captain gave the letter to his daughter")])
    with torch.no_grad():
        x = model.body.blocks[0].attention_norm(model.tokens(ids) + model.places(torch.arange(ids.shape[1])))
        query, key = model.body.blocks[0].attention.queries_and_keys(x)
        ours = layer.project(x[0].double())
    theirs = query @ key.mT
    assert torch.allclose((ours[0] @ ours[1].mT).squeeze(1), theirs[0].double(), rtol=1e-5, atol=1e-4)
    assert layer.causal is False
    assert kq.read(kq.models.DECODER)[3].causal is True
