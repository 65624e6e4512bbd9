"""Ablation: what parts of heads are worth, each sequence compared with itself."""

import re

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.dialled import dial_effect
from keyquery.instruments.ablation.losses import default_loss, next_token_loss
from keyquery.layers import LanguageModel
from keyquery.proof.families import tiny_model
from keyquery.support.statistics import paired


@pytest.fixture(scope="module")
def decoder():
    return LanguageModel.load(kq.models.DECODER)


@pytest.fixture(scope="module")
def batches():
    tokenizer = Tokenizer.load(kq.models.DECODER)
    ids = torch.tensor(tokenizer.encode(kq.models.LONG_TEXT.read_text()[:4000])[:768])
    return [{"input_ids": half} for half in ids.reshape(2, 16, 24)]


def losses(model, batches):
    with torch.no_grad():
        return torch.cat([next_token_loss(model, batch) for batch in batches])


def test_a_model_is_asked_for_what_it_was_made_for(decoder):
    encoder, tokenizer = LanguageModel.load(kq.models.ENCODER), Tokenizer.load(kq.models.ENCODER)
    assert default_loss(decoder, tokenizer).name == "next token"
    assert default_loss(encoder, tokenizer).name == "masked"
    with pytest.raises(ValueError, match="no mask token: pass a loss"):
        default_loss(encoder, None)


def test_a_change_is_that_of_a_dialled_model(decoder, batches):
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    reading = kq.ablate(decoder, batches, heads="2.*", measure="all")
    rows = [(2, head, part) for head in range(4) for part in PARTS]
    assert [(row["layer"], row["head"], row["part"]) for row in reading.rows] == rows
    before = losses(decoder, batches)
    with kq.dial(decoder, popularity=0, heads=[(2, 3)], data=batches):
        expected = paired(before, losses(decoder, batches))
    row = next(row for row in reading.rows if (row["head"], row["part"]) == (3, "popularity"))
    assert [row[name] for name in ("change", "low", "high")] == pytest.approx(list(expected), abs=1e-6)
    assert reading.loss == pytest.approx(float(before.mean()))
    assert reading.sequences == 32
    assert kq.Reading.load(reading.to_json()) == reading
    assert all(torch.equal(tensor, state[name]) for name, tensor in decoder.state_dict().items())


def test_position_is_turned_off_only_where_there_is_one():
    data = [{"input_ids": torch.randint(3, 60, (3, 8))}]
    for name, model, parts in (("llama", "LlamaForCausalLM", PARTS), ("gpt2", "GPT2LMHeadModel", PARTS[:3])):
        reading = kq.ablate(tiny_model(name, model=model), data, heads="0.0", means="global")
        assert [row["part"] for row in reading.rows] == list(parts)
    model = tiny_model("gpt2", model="GPT2LMHeadModel")
    for name in ("position", "only query_only", "only position + skew"):
        with pytest.raises(ValueError, match=re.escape(f"no positional term in its scores: '{name}' has no effect")):
            kq.ablate(model, data, changes=name, means="global")
    data = [{"input_ids": torch.randint(3, 60, (32, 8))}]
    assert dial_effect(model, data, None, {"position": 0.0}, means="position", samples=0).change != 0
    with pytest.raises(ValueError, match="no positional term in its scores: gains on it have no effect"):
        dial_effect(model, data, None, {"position": 0.0}, means="global", samples=0)


@pytest.mark.slow
def test_a_look_shows_what_is_lost_beside_its_verdicts(decoder, batches):
    look = kq.look(decoder, inputs=batches, name="decoder")
    parts = kq.ablate(decoder, batches, heads="3.*", measure="none")
    shown = look.with_costs(parts)
    assert set(shown.heads[-1]["ablation"]) == {"symmetric", "skew", "popularity", "query_only", "position"}
    assert [head["label"] for head in shown.heads] == [head["label"] for head in look.heads]  # parts alone say no need
    sets = kq.ablate(decoder, batches, heads="3.*", changes="needs", measure="none")
    shown = shown.with_costs(sets)
    assert {head["evidence"] for head in shown.heads[:12]} == {"weights"}
    assert {head["evidence"] for head in shown.heads[12:]} == {"estimated"}
    assert "ablation" not in shown.heads[0]
    assert {"symmetric", "zero", "only position + query_only"} <= set(shown.heads[-1]["ablation"])
    assert '"off":{"symmetric":[' in shown._repr_html_().replace("&quot;", '"')
    with pytest.raises(ValueError, match="only an ablation by head has costs of heads, this one is by layer"):
        look.with_costs(kq.ablate(decoder, batches, heads="3.*", by="layer", measure="none"))
    with pytest.raises(ValueError, match=r"no head \(3, 0\): it belongs to another model"):
        kq.look(nn.MultiheadAttention(8, 2)).with_costs(parts)


def test_a_turned_encoder_fills_in_other_words():
    encoder, tokenizer = LanguageModel.load(kq.models.ENCODER), Tokenizer.load(kq.models.ENCODER)
    ids = torch.tensor(tokenizer.encode(kq.models.LONG_TEXT.read_text()[:6000])[:1024]).reshape(32, 32)
    reading = dial_effect(encoder, [{"input_ids": ids}], tokenizer, {"symmetric": 0.0}, samples=2)
    assert reading.objective == "masked"
    assert reading.change > 0
    assert len(reading.samples) == 2
    assert " ___" in reading.samples[0]["text"]
    assert reading.samples[0]["says"] != reading.samples[0]["turned"]


def test_the_effect_of_directions_is_that_of_the_dial(decoder, batches):
    tokenizer = Tokenizer.load(kq.models.DECODER)
    effect = dial_effect(decoder, batches, tokenizer, {}, "1.2", directions=[0, 1], of="skew", gain=-1, samples=1)
    assert effect.gains == {"skew direction 0": -1, "skew direction 1": -1}
    assert effect.before == pytest.approx(float(losses(decoder, batches).mean()), abs=1e-6)
    with kq.dial(decoder, directions={(1, 2): [0, 1]}, of="skew", gain=-1):
        assert effect.after == pytest.approx(float(losses(decoder, batches).mean()), abs=1e-6)
    with pytest.raises(ValueError, match=r"directions are those of single heads: name them, such as 18\.6"):
        dial_effect(decoder, batches, tokenizer, {}, directions=[0])
