"""Whichever attention function a model has, it keeps: sinks, caps, masks, and what somebody registered."""

from contextlib import contextmanager

import pytest
import torch

import keyquery as kq
from keyquery.capture import attention_maps
from keyquery.testing.families import tiny_model
from tests.surgery.dial.test_running import GAINS, decoder, text

MODELS = {
    "gpt_oss": {},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "llama": {},
    "bert": {},
}


def honest(module, query, key, value, mask, scaling=None, s_aux=None, softcap=None, **rest):
    """Attention with sinks and caps, written down again; transformers passes the mask by position."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if mask is None else scores + mask[..., : key.shape[-2]]
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def by_width(module, query, key, value, attention_mask, **rest):
    """Attention that takes its scale from the width of queries, which a rewrite changes."""
    return honest(module, query, key, value, attention_mask, scaling=query.shape[-1] ** -0.5)


def narrow(module, query, key, value, attention_mask, scaling=None, **rest):
    """Attention for heads of at most 16 dimensions, as kernels have such limits."""
    if query.shape[-1] > 16:
        raise RuntimeError("head dimension must be at most 16\nsee the manual")
    return honest(module, query, key, value, attention_mask, scaling)


@contextmanager
def registered(function, masked=True):
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("own", function)
    if masked:
        AttentionMaskInterface.register("own", eager_mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop("own")
        AttentionMaskInterface._global_mapping.pop("own", None)


def padded():
    return {**text(2, 7), "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}


@torch.no_grad()
def outputs(model, batch):
    """As it is; with gains of one on all heads, and on one; with other gains; with a head projected."""
    found = [model(**batch)[0]]
    ways = (
        lambda: kq.dial(model),
        lambda: kq.dial(model, heads="0.1"),
        lambda: kq.dial(model, **GAINS),
        lambda: kq.dial(model, **GAINS, heads="1.*", data=[batch], means="global"),
        lambda: kq.project(model, (0, 1)),
    )
    for way in ways:
        with way():
            found.append(model(**batch)[0])
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(2)
def test_a_registered_implementation_is_kept(name):
    model, batch = tiny_model(name, **MODELS[name]), padded()
    model.set_attn_implementation("eager")
    eager = outputs(model, batch)
    with registered(honest):
        model.set_attn_implementation("own")
        own = outputs(model, batch)
        assert model.config._attn_implementation == "own"
    real = batch["attention_mask"].bool()
    for plain, ones, some, *others in (own, eager):
        assert torch.equal(ones, plain)
        assert torch.equal(some, plain)
        assert all((other - plain)[real].abs().max() > 1e-3 for other in others)
    for ours, its in zip(own, eager, strict=True):
        assert torch.allclose(ours[real], its[real], atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "gpt2", "qwen3"])
@pytest.mark.few(2)
def test_gains_of_one_change_no_bit_under_fused_attention(name):
    model, batch = tiny_model(name), padded()
    batch |= {"decoder_input_ids": batch["input_ids"]} if name == "t5" else {}
    model.set_attn_implementation("sdpa")
    fused = outputs(model, batch)
    assert torch.equal(fused[1], fused[0])
    assert torch.equal(fused[2], fused[0])
    model.set_attn_implementation("eager")
    real = batch["attention_mask"].bool() if name != "t5" else slice(None)
    for ours, its in zip(fused, outputs(model, batch), strict=True):
        assert torch.allclose(ours[real], its[real], atol=3e-5)


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_gains_of_one_change_no_bit_of_modules_that_attend_in_their_own_way(name):
    model, batch = decoder(name), text(2, 7)
    with torch.no_grad():
        plain = model(**batch).logits
        with kq.dial(model):
            assert torch.equal(model(**batch).logits, plain)


@pytest.mark.parametrize("make", [lambda: kq.Decoder(16, 2, 2), lambda: torch.nn.TransformerEncoderLayer(16, 2, 32)])
def test_gains_of_one_change_no_bit_of_other_layers(make):
    model, x = make().eval(), torch.randn(2, 5, 16)
    with torch.no_grad(), kq.dial(model) as dial:
        ones = model(x)
        dial.undo()
        torch.backends.mha.set_fastpath_enabled(False)  # which the dial does, too: it goes past the modules
        try:
            assert torch.equal(ones, model(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_gains_of_one_change_no_bit_with_a_cache():
    model, batch = decoder("llama"), text(1, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(**batch, **options).logits
    with kq.dial(model):
        ones = model.generate(**batch, **options).logits
    assert all(torch.equal(a, b) for a, b in zip(ones, plain, strict=True))


def test_an_implementation_without_masks_gets_none_under_a_dial_either():
    """Transformers drops masks of such; the dial of a model that sees the future sees it, too."""
    model, batch = decoder("llama"), text(1, 6)
    with registered(honest, masked=False):
        model.set_attn_implementation("own")
        plain, ones, *_ = outputs(model, batch)
        assert torch.equal(ones, plain)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            assert not torch.allclose(model(**batch)[0], plain, atol=1e-3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (by_width, "whose result changes with the width of queries and keys"),
        (narrow, r"which does not take queries of width \d+ \(head dimension must be at most 16\)"),
    ],
)
def test_an_implementation_that_minds_the_width_is_refused(function, said):
    model, batch = decoder("llama"), text(1, 6)
    with registered(function):
        model.set_attn_implementation("own")
        with torch.no_grad():
            plain = model(**batch).logits
            with kq.dial(model):
                assert torch.equal(model(**batch).logits, plain)
            with kq.dial(model, **GAINS), pytest.raises(ValueError, match=f"uses attention 'own', {said}.*eager"):
                model(**batch)
            assert torch.equal(model(**batch).logits, plain)


def test_other_models_of_the_family_attend_as_they_do():
    dialled, other, batch = decoder("llama"), decoder("llama"), text(1, 6)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        plain = other(**batch).logits
        with kq.dial(dialled, **GAINS):
            assert torch.equal(other(**batch).logits, plain)


def test_maps_of_a_dialled_model_are_those_that_it_attends_by():
    model, batch = decoder("llama"), text(1, 6)
    plain = attention_maps(model, batch)
    with kq.dial(model, symmetric=0, skew=0, popularity=0, query_only=0, position=0):
        flat = attention_maps(model, batch)
    assert not torch.allclose(plain[0], flat[0], atol=1e-3)
    even = torch.ones(6, 6).tril()
    assert torch.allclose(flat[0][0, 0], even / even.sum(1, keepdim=True), atol=1e-6)


def test_the_registered_names_are_transformers_own_with_masks():
    model, batch = decoder("llama"), padded()
    kq.register()
    for name, ours in (("sdpa", "keyquery"), ("eager", "keyquery_eager")):
        model.set_attn_implementation(name)
        with torch.no_grad():
            expected = model(**batch).logits
            model.set_attn_implementation(ours)
            assert torch.equal(model(**batch).logits, expected)
            with kq.dial(model):
                assert torch.equal(model(**batch).logits, expected)
