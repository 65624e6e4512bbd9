"""The dial in a running model: causes stay before effects, padding counts for nothing, caches agree, all is undone."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.intervene.rewrites import _CHANGED
from keyquery.proof.families import tiny_model

DECODERS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
OUTSIDE = {"bloom": "BloomForCausalLM", "gptj": "GPTJForCausalLM"}
GAINS = {"symmetric": 0.5, "skew": 0, "popularity": 0.7, "query_only": 0.8, "position": 1.2}


def decoder(name):
    model = tiny_model(name, model={**DECODERS, **OUTSIDE}[name])
    if name in DECODERS:
        model.set_attn_implementation("sdpa")
    return model


def text(*shape):
    return {"input_ids": torch.randint(3, 60, shape)}


@pytest.mark.parametrize("name", [*DECODERS, *OUTSIDE])
def test_no_token_sees_what_comes_after_it(name):
    model, data, inputs = decoder(name), text(4, 12), text(1, 9)
    later = {"input_ids": inputs["input_ids"].clone()}
    later["input_ids"][0, 6:] += 1
    with kq.dial(model, **GAINS, data=[data], means="global"), torch.no_grad():
        one, other = model(**inputs).logits, model(**later).logits
    assert torch.allclose(one[:, :6], other[:, :6], atol=1e-5)
    assert not torch.allclose(one[:, 6:], other[:, 6:], atol=1e-3)


@pytest.mark.parametrize("name", [*DECODERS, "gptj"])
def test_generation_with_a_cache_is_generation_without(name):
    model, data = decoder(name), text(4, 12)
    inputs = {**text(2, 5), "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    with kq.dial(model, **GAINS, data=[data], means="global"):
        cached, uncached = (model.generate(**inputs, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    for one, other in zip(cached.logits, uncached.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert not torch.allclose(cached.logits[0], plain.logits[0], atol=1e-3)


def test_a_keyquery_decoder_with_caches_is_one_without():
    model, x = kq.Decoder(16, depth=2, heads=2, rope=kq.Rope(8)).double().eval(), torch.randn(2, 7, 16).double()
    with kq.dial(model, **GAINS, data=[{"x": x}], means="global"):
        whole, caches = model(x), [kq.Cache(), kq.Cache()]
        parts = torch.cat([model(piece, caches=caches) for piece in (x[:, :4], x[:, 4:5], x[:, 5:])], 1)
    assert torch.allclose(parts, whole, atol=1e-12)


def test_only_the_chosen_heads_change():
    layer, x = kq.Attention(16, 4).double().eval(), torch.randn(1, 5, 16).double()
    layer.output.weight.data = torch.eye(16).double()  # so that heads stay apart
    before = layer(x)
    for heads in ("0.1,0.3", [(0, 1), (0, 3)], ["0.3", (0, 1)]):
        with kq.dial(layer, popularity=0, heads=heads):
            after = layer(x)
        change = (after - before).abs().reshape(5, 4, 4).amax((0, 2))
        assert (change > 1e-6).tolist() == [False, True, False, True]


def test_two_changes_of_one_model_stand_side_by_side_and_go_in_any_order():
    model, inputs = decoder("llama"), text(1, 6)

    def out():
        return model(**inputs).logits

    with torch.no_grad():
        before = out()
        first, second = kq.dial(model, popularity=0, heads="0.*"), kq.dial(model, position=0, heads="1.*")
        both = out()
        with pytest.raises(ValueError, match=r"head 0.0 is already changed"):
            kq.dial(model, skew=0)
        first.undo()
        alone = out()
        with pytest.raises(RuntimeError, match="already undone"):
            first.undo()
        second.undo()
        assert torch.equal(out(), before)
        with kq.dial(model, position=0, heads="1.*"):
            assert torch.equal(out(), alone)
    assert not torch.allclose(both, alone)
    assert model not in _CHANGED


def test_a_family_that_ignores_the_name_is_found_out():
    class Deaf(nn.Module):
        """Looks like an attention module of transformers, and attends in its own way."""

        def forward(self, hidden_states, **rest):
            return hidden_states, None

    model, inputs = decoder("llama"), text(1, 6)
    model.model.layers[1].self_attn.forward = Deaf().forward
    with (
        pytest.raises(RuntimeError, match=r"layers.1.self_attn: its attention was never called"),
        kq.dial(model, popularity=0),
    ):
        model(**inputs)


def test_a_cache_that_was_filled_elsewhere_is_refused():
    model, inputs = decoder("llama"), text(1, 6)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        with kq.dial(model, skew=0), pytest.raises(ValueError, match="keys whose queries are unknown"):
            model(**text(1, 1), past_key_values=cache)


BAD = [
    ({"heads": "7.0"}, r"no self-attention layer 7, requested by '7\.0'; available: 0 to 1"),
    ({"heads": [(1, 9)]}, "layer 1 has no head 9"),
    ({"heads": "three"}, r'pairs \(layer, head\) or strings such as "3.\*"'),
    ({"heads": 0}, r'strings such as "0\.\*", got 0'),
    ({"heads": []}, "at least one head"),
    ({"symmetric": float("nan")}, "symmetric"),
    ({"skew": "off"}, "skew"),
    ({"skew": 1e39}, "skew must be a gain"),
    ({"data": []}, "no activations"),
    ({"data": text(1, 5)}, "data must be batches: .* got a dict"),
    ({"data": [torch.ones(1, 5)]}, "data must be batches: .* got a Tensor"),
]
MODELS = [
    (lambda: "llama", r"torch.nn.Module, got str"),
    (lambda: nn.MultiheadAttention(8, 2, device="meta"), "on the meta device"),
    (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "has extra keys"),
    (lambda: kq.Attention(8, 2, dropout=0.1), r"in training mode with dropout: call model.eval\(\) first"),
    (lambda: tiny_model("deberta_v2"), "disentangled position terms"),
]


@pytest.mark.unchecked
def test_bad_input_is_told_and_changes_nothing():
    model = decoder("llama")
    for options, said in BAD:
        with pytest.raises((TypeError, ValueError), match=said):
            kq.dial(model, **options)
    for make, said in MODELS:
        with pytest.raises((TypeError, ValueError), match=said):
            kq.dial(make(), position=0)
    with kq.dial(model, popularity=0), pytest.raises(ValueError, match="already dialled or projected: undo that first"):
        kq.dial(model, heads="0.0", data=[text(1, 5)])
    assert model not in _CHANGED
    kq.dial(model, heads=[[0, 1]]).undo()


def test_a_swapped_model_is_dialled_as_the_original_is():
    """A copy of the attention has the same queries and keys, and so the same parts; with a cache, too."""
    model, data = decoder("llama"), text(4, 12)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    inputs = text(1, 5)
    with kq.dial(model, **GAINS, data=[data], means="global"):
        expected = model.generate(**inputs, **options)
    with kq.swap(model, "general"), kq.dial(model, **GAINS, data=[data], means="global"):
        swapped = model.generate(**inputs, **options)
    for one, other in zip(swapped.logits, expected.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
