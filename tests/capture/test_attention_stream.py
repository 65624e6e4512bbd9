"""Maps as they come are the maps that models return, and models are left as they were."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.capture import attention_maps
from keyquery.capture.attention_stream import LISTENING, stream_maps
from keyquery.capture.transformers_attention import configs_of
from keyquery.capture.value_norms import carried
from keyquery.testing.families import tiny_inputs, tiny_model
from tests import vision

pytest.importorskip("transformers")


def streamed(model, batch):
    heard = []
    order, _ = stream_maps(model, batch, heard.append)
    return heard, [torch.cat([one.maps for one in heard if one.call == call], 1) for call in order]


# Grouped queries, windows, caps, sinks, relative biases, shared layers, ALiBi, and ways to attend of their own.
FAMILIES = ["bert", "llama", "gpt2", "gemma2", "gpt_oss", "t5", "albert", "bloom", "deberta_v2", "modernbert", "falcon"]


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_one_by_one_are_the_models_own_maps(name):
    model = tiny_model(name)
    batch = tiny_inputs(name, model)
    expected = attention_maps(model, batch)
    heard, found = streamed(model, batch)
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its[..., : mine.shape[-1]])
    for one in heard:
        if one.allowed is not None and one.maps.shape[-2] == one.maps.shape[-1]:
            seen = one.allowed if one.allowed.shape[1] == 1 else one.allowed[:, one.first : one.first + 1]
            assert not (one.maps * ~seen).any()
            assert (one.maps[seen.expand_as(one.maps)] > 0).all()


def test_a_model_that_asks_the_interface_is_heard_head_by_head():
    heard, _ = streamed(tiny_model("llama"), {"input_ids": torch.randint(3, 60, (1, 6))})
    assert {one.maps.shape[1] for one in heard} == {1}
    assert [one.last for one in heard] == [False, False, False, True] * 2
    assert heard[0].allowed[0, 0].equal(torch.ones(6, 6, dtype=torch.bool).tril())


def test_what_the_model_gives_is_what_it_gives_alone():
    model = tiny_model("llama")
    ids = {"input_ids": torch.randint(3, 60, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    ids["attention_mask"][1, :2] = 0
    with torch.no_grad():
        expected = model(**ids).last_hidden_state
    heard = []
    _, out = stream_maps(model, ids, heard.append)
    assert torch.allclose(out.last_hidden_state[0], expected[0], atol=1e-5)
    assert torch.allclose(out.last_hidden_state[1, 2:], expected[1, 2:], atol=1e-5)
    assert heard[0].real.tolist() == ids["attention_mask"].bool().tolist()
    assert not heard[0].allowed[1, 0, :, :2].any()


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_every_tower_is_put_back(before):
    model = vision.llava()
    model.set_attn_implementation(before)
    model.config.vision_config._attn_implementation_internal = "sdpa"  # as a user may have set one of them
    names = [config._attn_implementation for config in configs_of(model)]
    assert len(names) == 3
    batch = dict(
        vision.llava_processor()(images=vision.photograph(), text=f"<image> {vision.TEXT}", return_tensors="pt")
    )
    for way in (attention_maps, lambda *given: stream_maps(*given, lambda heard: None)):
        way(model, batch)
        assert [config._attn_implementation for config in configs_of(model)] == names
    assert not len(LISTENING)

    def fail(heard):
        raise RuntimeError("the listener fell asleep")

    with pytest.raises(ValueError, match="the listener fell asleep"):
        stream_maps(model, batch, fail)
    assert [config._attn_implementation for config in configs_of(model)] == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules() if not kept(module))
    assert not len(LISTENING)


def kept(module):
    """Hooks that transformers itself leaves, to collect what is asked for."""
    return all("output_capturing" in hook.__qualname__ for hook in module._forward_hooks.values())


def test_only_the_layers_that_a_model_returns_are_named():
    batch = dict(
        vision.llava_processor()(images=vision.photograph(), text=f"<image> {vision.TEXT}", return_tensors="pt")
    )
    heard = []
    order, _ = stream_maps(vision.llava(), batch, heard.append)
    names = {one.call: one.module for one in heard}
    assert [names[call] for call in order] == [f"language_model.layers.{layer}.self_attn" for layer in range(2)]
    assert sum("vision_tower" in name for name in names.values()) == 2


@pytest.mark.parametrize("kernel", ["general", "rbf", "split"])
@pytest.mark.parametrize("how", ["plain", "causal", "padding", "pairs", "heads"])
def test_own_layers_say_what_they_may_see(kernel, how):
    layer = kq.Attention(16, 4, kernel=kernel, kv_heads=2 if kernel == "general" else None).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 5:] = False
    pairs = torch.rand(2, 4, 7, 7) < 0.5
    pairs[..., 0] = True
    given = {"plain": {}, "causal": {"is_causal": True}, "padding": {"mask": real}}
    given |= {"pairs": {"mask": pairs[:, 0], "is_causal": True}, "heads": {"mask": pairs}}
    expected = layer.maps(x, **given[how])
    heard, (found,) = streamed(layer, {"x": x, **given[how]})
    assert torch.equal(found, expected)
    assert torch.allclose(found.sum(-1), torch.ones((), dtype=torch.float64))
    allowed = heard[0].allowed
    if how == "plain":
        assert allowed is None
    else:
        assert torch.equal(allowed.expand_as(found), expected > 0)
    assert (heard[0].real is not None) == (how == "padding")
    # By hand, from queries and keys.
    if how == "heads" and kernel == "general":
        query, key = layer.queries_and_keys(x)
        scores = query @ key.repeat_interleave(2, 1).mT * layer.scale
        assert torch.allclose(found, scores.masked_fill(~pairs, -torch.inf).softmax(-1))


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gpt_neox", "vit"])
def test_what_is_carried_is_what_the_model_writes(name):
    # Σ_j A_ij f(x_j) over all heads is what leaves the output map; its length for a lone token is that of f(x).
    model = tiny_model(name).double()
    batch = {
        key: value.double() if value.is_floating_point() else value for key, value in tiny_inputs(name, model).items()
    }
    heads = kq.read(model)
    layer, maps = heads[1], heads.values(1)
    seen = {}
    entered = model.get_submodule(next(layer.modules[role] for role in ("value", "fused") if role in layer.modules))
    left = model.get_submodule(layer.modules["output"])
    hooks = [
        entered.register_forward_pre_hook(lambda module, args: seen.update(x=args[0])),
        left.register_forward_hook(lambda module, args, out: seen.update(out=out)),
    ]
    with carried(model) as (found, reason):
        attention = attention_maps(model, batch)[1]
    for hook in hooks:
        hook.remove()
    assert reason is None
    value = seen["x"][:, None, None] @ maps.value.mT + (0 if maps.value_bias is None else maps.value_bias.unsqueeze(-2))
    vectors = (value @ maps.output).flatten(1, 2)
    written = (attention @ vectors).sum(1) + (0 if maps.output_bias is None else maps.output_bias)
    assert torch.allclose(written, seen["out"])
    assert torch.allclose(found[layer.name], vectors.norm(dim=-1))


def test_what_own_layers_carry():
    layer = kq.Attention(16, 4, kv_heads=2).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with carried(layer) as (found, reason):
        layer(x)
    assert reason is None
    value = layer.value(x).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1)
    output = layer.output.weight.mT.unflatten(0, (4, 4))
    assert torch.allclose(found[""], (value @ output).norm(dim=-1))


def test_what_has_no_maps_is_told():
    with pytest.raises(ValueError, match="Linear returns no attention maps: it is neither a transformers model"):
        stream_maps(nn.Linear(2, 2), {"input": torch.zeros(1, 2)}, lambda heard: None)
    assert (
        streamed(vision.clip(), {"input_ids": torch.tensor([[2, 7, 3]]), "pixel_values": torch.zeros(1, 3, 32, 32)})[1]
        == []
    )
