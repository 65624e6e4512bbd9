"""Heads of models of one's own are found by running them: their weights, groups, rotations and output maps."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.listening.live import live_heads
from tests.listening.models import (
    CausalSelfAttention,
    FusedAttention,
    LlamaAttention,
    NormedAttention,
    RawAttention,
    Stack,
)

ROPES = {
    "halves": kq.Rope(6),
    "interleaved": kq.Rope(6, interleaved=True),
    "partial": kq.Rope(4),
    "long": kq.Rope(6, base=5e5),
}
MAKERS = {
    "fused": lambda: CausalSelfAttention(24, 4),
    "fused by head": lambda: FusedAttention(24, 4),
    "raw": lambda: RawAttention(24, 4),
    "grouped": lambda: LlamaAttention(24, 4, 2),
    "one key head": lambda: LlamaAttention(24, 4, 1, repeat=False),
    **{name: lambda rope=rope: LlamaAttention(24, 4, 2, rope=rope) for name, rope in ROPES.items()},
}


def stack(name, depth=2):
    torch.manual_seed(0)
    return Stack([MAKERS[name]() for _ in range(depth)]).eval(), {"ids": torch.randint(31, (5, 9))}


@pytest.mark.parametrize("name", MAKERS)
def test_forms_give_the_scores_of_the_calls(name):
    """The oracle are the model's own queries and keys: Q x and K x, rotated, must be what the call had."""
    model, batch = stack(name)
    model = model.double()
    heads = live_heads(model, batch)
    with torch.no_grad(), kq.listen(model) as calls:
        model(**batch)
    hooks = []
    with torch.no_grad():
        for block in model.h:
            hooks.append(block.attn.register_forward_pre_hook(lambda module, args: entered.append(args[0])))
        entered = []
        model(**batch)
    for hook in hooks:
        hook.remove()
    assert len(heads) == len(calls) == 2
    for layer, call, x in zip(heads, calls, entered, strict=True):
        query, key = (t.flatten(1, 2) for t in layer.project(x))
        if layer.rope is not None:
            query, key = (layer.rope.rotate(t, torch.arange(9)) for t in (query, key))
        scores = layer.scale * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
        expected = call.scale * call.query @ call.keys().mT
        assert (scores - expected).abs().max() < 1e-5 * expected.abs().max(), layer.name
        assert layer.causal == call.is_causal
        assert layer.heads == 4


@pytest.mark.parametrize("name", ["fused", "grouped", "halves"])
def test_weights_are_those_of_the_module_and_follow_training(name):
    model, batch = stack(name, depth=1)
    layer = model.h[0].attn
    heads = live_heads(model, batch)
    weight = layer.c_attn.weight[:24] if name == "fused" else layer.wq.weight
    assert torch.equal(heads[0].weights.query.flatten(0, 2), weight)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(heads[0].weights.query.flatten(0, 2), weight)
    out = layer.c_proj if name == "fused" else layer.wo
    assert torch.equal(heads.values(0).output.flatten(0, 2), out.weight.mT)
    assert heads[0].weights.query.shape[:2] == ((4, 1) if name == "fused" else (2, 2))


def test_models_that_are_known_need_no_batch_and_others_ask_for_one():
    assert len(live_heads(nn.TransformerEncoderLayer(8, 2))) == 1
    model, batch = stack("raw")
    with pytest.raises(ValueError, match="with data, its heads are found by running it"):
        live_heads(model)
    live_heads(model, batch)
    assert len(live_heads(model)) == 2, "once found, they are known"


@pytest.mark.parametrize("name", ["fused", "raw", "halves"])
def test_what_was_observed_holds_for_these_parameters_alone_wherever_they_are(name):
    model, batch = stack(name, depth=1)
    before = live_heads(model, batch)[0].weights.query
    model.double()
    assert torch.equal(live_heads(model)[0].weights.query, before.double())
    state = {key: 2 * value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="with data, its heads are found by running it"):
        live_heads(model)
    assert torch.equal(live_heads(model, batch)[0].weights.query, 2 * before.double())
    model.h[0].attn = MAKERS["grouped"]().double()
    assert live_heads(model, batch)[0].weights.query.shape[:2] == (2, 2)


def test_norms_of_ones_own_are_refused_in_one_sentence_and_maps_still_work():
    model, batch = Stack([NormedAttention(24, 4)]).eval(), {"ids": torch.randint(31, (5, 9))}
    with pytest.raises(ValueError, match="are no linear map of its input, with or without RoPE") as error:
        kq.look(model, inputs=[batch])
    assert "\n" not in str(error.value)
    assert kq.roles(model, inputs=[batch]).heads


@pytest.mark.parametrize("name", ["raw", "grouped", "halves"])
def test_every_analysis_works_without_a_declaration(name):
    model, _ = stack(name)
    batch = {"ids": torch.randint(31, (40, 9))}
    plain = model(**batch)

    def loss(model, batch):
        return model(**batch).square().mean((1, 2))

    assert len(kq.look(model, inputs=[batch]).heads) == 8
    assert len(kq.ablate(model, [batch], loss, changes=["skew", "zero"]).rows) == 16
    assert kq.attribute(model, inputs=[batch], head="1.0", query=3).sources
    with kq.dial(model, skew=0, data=[batch]):
        assert not torch.allclose(model(**batch), plain)
    with kq.ablate_heads(model, heads="0.1"):
        assert not torch.allclose(model(**batch), plain)
    assert torch.equal(model(**batch), plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, **data: kq.dial(model, skew=0, means="global" if data else None, **data),
        lambda model, **data: kq.ablate_heads(model, "mean" if data else "zero", heads="0.1", **data),
    ],
    ids=["dial", "ablate_heads"],
)
def test_a_change_of_a_model_of_ones_own_asks_for_data_and_finds_its_heads_on_it(change):
    model, batch = stack("grouped")
    with pytest.raises(ValueError, match="with data, its heads are found by running it"):
        change(model)
    plain = model(**batch)
    with change(model, data=[batch]):
        assert not torch.allclose(model(**batch), plain)
    assert torch.equal(model(**batch), plain)
