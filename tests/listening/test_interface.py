"""Attention through transformers' interface, and of `kq.Attention`, is seen, and replaced, as the model has it."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import keyquery as kq
from keyquery.proof.families import tiny_model
from tests.listening.models import (
    REPLACEMENTS,
    assert_as_it_was,
    assert_one_sentence,
    assert_replaced,
    formula,
    full_precision,
    randomised,
    snapshot,
)

# The first attention module, and its output projection.
PROJECTIONS = {
    "llama": ("layers.0.self_attn", "o_proj"),
    "gpt2": ("h.0.attn", "c_proj"),
    "deepseek": ("layers.0.self_attn", "o_proj"),
    "gemma2": ("layers.0.self_attn", "o_proj"),
    "gpt_oss": ("layers.0.self_attn", "o_proj"),
    "t5": ("encoder.block.0.layer.0.SelfAttention", "o"),
}
EAGER = ("gemma2", "gpt_oss")  # which have soft caps and sinks
CASES = [(name, "eager") for name in PROJECTIONS] + [(name, "sdpa") for name in PROJECTIONS if name not in EAGER]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    full_precision(monkeypatch)


def made(name, attention, **config):
    model = tiny_model(name, **({"sliding_window": 3} if name in EAGER else {}), **config)
    model = model if name == "gpt_oss" else model.double()
    model.set_attn_implementation(attention)
    module, projection = PROJECTIONS[name]
    module = model.get_submodule(module)
    return model, module, getattr(module, projection)


def padded(name, n=6):
    mask = torch.ones(3, n, dtype=torch.long)
    mask[1, :2] = 0
    mask[2, n - 1 :] = 0
    inputs = {"input_ids": torch.randint(3, 60, (3, n)), "attention_mask": mask}
    return {**inputs, "decoder_input_ids": torch.randint(3, 60, (3, 4))} if name == "t5" else inputs


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_models_go_on_with_what_was_replaced(name, attention, replacement):
    model, module, projection = made(name, attention)
    inputs = padded(name)
    assert_replaced(
        replacement,
        model,
        module,
        lambda x: projection(x.to(next(model.parameters()).dtype)),
        lambda: model(**inputs)[0][inputs["attention_mask"].bool()] if name != "t5" else model(**inputs)[0],
        limit=1e-4 if name == "gpt_oss" else 1e-6,
        real=inputs["attention_mask"].bool(),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.parametrize("replacement", ["bias", "wider"])
def test_flex_attention_goes_on_with_what_was_replaced(replacement):
    """A bias must reach every row and head: transformers' own function adds that of one head alone."""
    model = tiny_model("llama", hidden_size=64)
    model.set_attn_implementation("flex_attention")
    inputs = padded("llama")
    module = model.layers[0].self_attn
    real = inputs["attention_mask"].bool()
    assert_replaced(
        replacement,
        model,
        module,
        lambda x: module.o_proj(x.float()),
        lambda: model(**inputs)[0][real],
        limit=1e-4,
        real=real,
    )
    with torch.no_grad(), kq.listen(model) as calls:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad(), kq.listen(model) as eager:
        model(**inputs)
    for call, other in zip(calls, eager, strict=True):
        torch.testing.assert_close(call.weights().transpose(1, 2)[real], other.weights().transpose(1, 2)[real])


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek", "gpt2", "t5"])
def test_every_implementation_shows_the_same(name, mask):
    """Fused attention that needs no mask has none, and is causal all the same."""
    model = tiny_model(name, **({"sliding_window": 3} if name == "gemma3" else {})).double()
    inputs = padded(name)
    inputs = inputs if mask else {key: value for key, value in inputs.items() if "mask" not in key}
    shown = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        with torch.no_grad(), kq.listen(model) as calls:
            model(**inputs)
        shown.append(calls)
    for call, other in zip(*shown, strict=True):
        facts = [(seen.scale, seen.is_causal, seen.is_cross, seen.name) for seen in (call, other)]
        assert facts[0] == facts[1]
        assert mask or name in ("gemma3", "t5") or (other.attn_mask is None and other.is_causal)
        real = torch.ones(call.query.shape[::2], dtype=torch.bool) if call.real_queries is None else call.real_queries
        for mine, theirs in ((call.weights(), other.weights()), (call.output(), other.output())):
            torch.testing.assert_close(mine.transpose(1, 2)[real], theirs.transpose(1, 2)[real], atol=1e-9, rtol=1e-7)


def by_width(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """An implementation that derives its scale from the width of queries."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def test_an_implementation_of_ones_own():
    """Its table stays in use; its queries are not replaced: only it knows what it computes."""
    AttentionInterface.register("by_width", by_width)
    AttentionMaskInterface.register("by_width", sdpa_mask)
    model, *_ = made("llama", "by_width")
    inputs = padded("llama")
    with torch.no_grad():
        plain = model(**inputs)[0]
        with kq.listen(model) as calls:
            assert torch.equal(model(**inputs)[0], plain)
        with kq.listen(model, lambda call: {"output": call.output()}):
            torch.testing.assert_close(model(**inputs)[0], plain)
        before = snapshot(model)
        with (
            pytest.raises(ValueError, match="'by_width', which is not one of transformers") as error,
            kq.listen(model, REPLACEMENTS["query"]),
        ):
            model(**inputs)
        assert_one_sentence(error)
        assert_as_it_was(model, before)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    real = inputs["attention_mask"].bool()
    for call, weights in zip(calls, maps, strict=True):
        torch.testing.assert_close(call.weights().transpose(1, 2)[real], weights.transpose(1, 2)[real])


def test_two_models_of_an_architecture_are_listened_to_apart():
    first, second = (made("llama", "sdpa")[0] for _ in range(2))
    ids = torch.randint(3, 60, (1, 5))
    with torch.no_grad():
        plain = second(ids)[0]
        with kq.listen(first) as of_first:
            with kq.listen(second, lambda call: {"output": 0 * call.output()}):
                first(ids)
                assert not torch.allclose(second(ids)[0], plain)
            assert torch.equal(second(ids)[0], plain)
            first(ids)
    assert len(of_first) == 4
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"


# `kq.Attention`

LAYERS = {
    "plain": ({}, {}),
    "grouped, causal": ({"kv_heads": 2}, {"is_causal": True}),
    "rotated": ({"rope": kq.Rope(4)}, {"positions": torch.tensor([3, 0, 1, 7, 2])}),
    "padded": ({"kv_heads": 1}, {"mask": torch.tensor([[True] * 5, [False, False, True, True, True]])}),
    "padded, causal": ({}, {"mask": torch.tensor([[True] * 5, [True, True, True, False, False]]), "is_causal": True}),
    "pairs": ({}, {"mask": torch.ones(5, 5).triu(-1).bool()[None].expand(2, 5, 5)}),
    "kernel": ({"kernel": "rbf"}, {"is_causal": True}),
}


@pytest.mark.parametrize("replacement", [None, *REPLACEMENTS])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_ours_go_on_with_what_was_replaced(name, replacement):
    options, arguments = LAYERS[name]
    layer = randomised(kq.Attention(16, 4, **options))
    x = torch.randn(2, 5, 16).double()
    if replacement is not None:
        assert_replaced(replacement, layer, layer, layer.output, lambda: layer(x, **arguments))
        return
    with torch.no_grad(), kq.listen(layer) as calls:
        out = layer(x, **arguments)
    (call,) = calls
    assert (call.heads, call.key_heads) == (4, options.get("kv_heads", 4))
    assert call.is_causal == ("causal" in name or name == "kernel")
    torch.testing.assert_close(layer.output(formula(call, {}).transpose(1, 2).flatten(2)), out, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(call.output(), formula(call, {}), atol=1e-10, rtol=1e-9)
