"""Where a dial could be wrong without a word: gradients, copies, masks of others. It is right, or it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.intervene.rewrites import sites_of
from keyquery.proof.families import tiny_model
from tests.intervene.dial.test_running import decoder, text


def test_gradients_flow_to_inputs_and_weights():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    packed = encoder.self_attn.in_proj_weight.detach().requires_grad_()

    def through(weight):
        return torch.func.functional_call(encoder, {"self_attn.in_proj_weight": weight}, x.detach())

    with kq.dial(encoder, skew=0.2, popularity=0.5):
        assert torch.autograd.gradcheck(encoder, x)
        assert torch.autograd.gradcheck(through, packed)
    decoder = kq.Decoder(8, depth=1, heads=2, rope=kq.Rope(4)).double()
    weight = decoder.blocks[0].attention.query.weight

    def loss(query):
        return torch.func.functional_call(decoder, {"blocks.0.attention.query.weight": query}, x.detach())

    with kq.dial(decoder, skew=0.2, popularity=0.5):
        assert torch.autograd.gradcheck(loss, weight.detach().requires_grad_())


def test_weights_that_were_replaced_are_seen():
    model, inputs = decoder("bloom"), text(1, 6)
    other = decoder("bloom")
    with torch.no_grad():
        with kq.dial(other, skew=0):
            expected = other(**inputs).logits
        with kq.dial(model, skew=0):
            model.load_state_dict(other.state_dict(), assign=True)
            assert torch.allclose(model(**inputs).logits, expected, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: decoder("llama"), lambda: nn.TransformerEncoderLayer(8, 2, 16).eval()])
def test_a_changed_model_is_neither_copied_nor_pickled(make):
    model = make()
    with kq.dial(model, skew=0):
        with pytest.raises(RuntimeError, match="cannot be copied: undo the change first"):
            copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            pickle.dumps(model)
    assert copy.deepcopy(model) is not model


def test_texts_beyond_known_rotations_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=8)
    with kq.dial(model, popularity=0), torch.no_grad():
        model(**text(1, 8))
        with pytest.raises(ValueError, match="scores more than 8 tokens in another way, got 9"):
            model(**text(1, 9))


def test_an_encoder_that_ran_before_is_no_false_alarm():
    model = tiny_model("t5", model="T5ForConditionalGeneration")
    inputs = text(1, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 0}
    with kq.dial(model, popularity=0, data=[{**inputs, "decoder_input_ids": inputs["input_ids"]}], means="global"):
        cached, uncached = (model.generate(**inputs, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, uncached)


def test_latent_heads_take_means_of_data():
    """Those of the batch itself: then means of data and of the batch agree in the first layer."""
    model, inputs = tiny_model("deepseek"), text(2, 7)
    first = min(sites_of(model))
    with torch.no_grad():
        with kq.dial(model, popularity=0, skew=0.5, heads=f"{first}.*"):
            batch = model(**inputs)[0]
        with kq.dial(model, popularity=0, skew=0.5, heads=f"{first}.*", data=[inputs], means="global"):
            assert torch.allclose(model(**inputs)[0], batch, atol=1e-4)


def test_the_swap_below_a_dial_is_undone_after_it():
    model = decoder("llama")
    swapped = kq.swap(model, "psd")
    dial = kq.dial(model, popularity=0)
    with pytest.raises(RuntimeError, match="dialled or projected: undo that first"):
        swapped.undo()
    dial.undo()
    swapped.undo()
