"""Attention maps are those of a model's own eager attention, whatever it runs with; models are left as they were."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.listening import attention_maps
from keyquery.listening.attachment import attached
from keyquery.listening.maps import last_queries, layers_of, maps_by_head, run_with
from keyquery.listening.transformers_attention import configs_of
from keyquery.proof.families import tiny_inputs, tiny_model
from tests import vision
from tests.instruments.plain import GPT, ViT
from tests.intervene.tiny import assert_as_it_was, snapshot

pytest.importorskip("transformers")

# GQA, windows, soft caps, sinks, relative biases, shared layers, ALiBi, disentangled and fused projections.
FAMILIES = ["bert", "gpt2", "llama", "bloom", "t5", "gpt_oss", "gemma2", "albert", "deberta_v2", "modernbert", "falcon"]


def padded(name, side):
    """A batch of two sequences, the second of which is padded."""
    batch = {"input_ids": torch.randint(3, 60, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    if side is not None:
        batch["attention_mask"][1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    if name == "t5":
        batch["decoder_input_ids"] = torch.randint(3, 60, (2, 5))
    return batch


def eager(model, batch):
    """What the model itself returns."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    model.set_attn_implementation(before)
    return out


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_those_of_the_models_eager_attention(name, side, implementation):
    model, batch = tiny_model(name), padded(name, side)
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip("it has no such implementation")
    out = eager(model, batch)
    expected = out.encoder_attentions if name == "t5" else out.attentions
    maps = attention_maps(model, batch)
    real = batch["attention_mask"].bool()[:, None, :, None]
    rounding = 1e-6 if implementation == "eager" else 1e-5  # of fused attention, in the layers below
    assert len(maps) == len(expected)
    for layer, own in zip(maps, expected, strict=True):
        torch.testing.assert_close(layer * real, own[..., : layer.shape[-1]] * real, atol=rounding, rtol=0)


def test_all_three_stacks_of_an_encoder_decoder_are_seen():
    model, batch = tiny_model("t5"), padded("t5", "left")
    out, seen = eager(model, batch), {}

    def keep(call, number):
        stack = "cross" if call.is_cross else call.name.split(".")[0]
        seen.setdefault(stack, []).append(call.weights())

    run_with(model, batch, keep)
    real = batch["attention_mask"].bool()[:, None, :, None]
    stacks = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    for stack, expected in stacks.items():
        shown = real if stack == "encoder" else 1
        for layer, own in zip(seen[stack], expected, strict=True):
            torch.testing.assert_close(layer * shown, own * shown, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_oss", "gemma2"])
def test_heads_one_by_one_and_last_queries_are_parts_of_the_whole(name):
    calls = []
    run_with(tiny_model(name), padded(name, "left"), lambda call, number: calls.append(call))
    for call in calls:
        whole = call.weights()
        heads = [maps for _, maps in maps_by_head(call)]
        assert [maps.shape[1] for maps in heads] == [1] * call.heads
        torch.testing.assert_close(torch.cat(heads, 1), whole)
        last = last_queries(call, 3)
        torch.testing.assert_close(last.weights(), whole[..., -3:, :])
        assert last.positions.equal(call.positions[:, -3:])


def test_the_model_runs_as_it_does_alone():
    model, batch = tiny_model("llama"), padded("llama", "left")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
    _, out = run_with(model, batch, lambda call, number: call.weights())
    assert torch.equal(out.last_hidden_state, expected)


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_every_tower_keeps_its_implementation(before):
    model = vision.llava()
    model.set_attn_implementation(before)
    model.config.vision_config._attn_implementation_internal = "sdpa"  # as a user may have set one of them
    model.train()
    names = [config._attn_implementation for config in configs_of(model)]
    assert len(names) == 3
    batch, during = joint_batch(), []
    model(**batch)  # transformers attaches its own hooks when a model first runs
    state = snapshot(model)

    def note(call, number):
        during.append(([config._attn_implementation for config in configs_of(model)], model.training))

    run_with(model, batch, note)
    assert during == [(names, False)] * 4
    assert_as_it_was(model, state)

    def fail(call, number):
        raise RuntimeError("the listener fell asleep")

    with pytest.raises(ValueError, match="the listener fell asleep"):
        run_with(model, batch, fail)
    assert_as_it_was(model, state)
    assert attached(model) is None


def joint_batch():
    return dict(
        vision.llava_processor()(images=vision.photograph(), text=f"<image> {vision.TEXT}", return_tensors="pt")
    )


def test_the_layers_over_all_tokens_are_told_from_towers():
    model, batch = vision.llava(), joint_batch()
    calls, out = run_with(model, batch, lambda call, number: None)
    layers = layers_of(model, calls, out)
    assert [layer.name for layer in layers] == [f"language_model.layers.{layer}.self_attn" for layer in range(2)]
    assert sum("vision_tower" in call.name for call in calls) == 2
    tower = layers_of(model, calls, out, tokens=17)  # of the class token and 16 patches
    assert {"vision_tower" in layer.name for layer in tower} == {True}


def test_separate_towers_are_refused():
    batch = {"input_ids": torch.tensor([[2, 7, 3]]), "pixel_values": torch.zeros(1, 3, 32, 32)}
    with pytest.raises(ValueError, match="CLIPModel has separate text and image towers without attention between them"):
        attention_maps(vision.clip(), batch)


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
    calls = []
    run_with(layer, {"x": x, **given[how]}, lambda call, number: calls.append(call))
    maps, mask = calls[0].weights(), calls[0].mask
    torch.testing.assert_close(maps, layer.maps(x, **given[how]))
    assert (mask is None) == (how == "plain")
    if mask is not None:
        assert torch.equal(mask.expand_as(maps), maps > 0)
    assert (calls[0].real is not None) == (how == "padding")


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_of_ones_own_has_maps(fused):
    model, idx = GPT(fused=fused).eval(), torch.randint(60, (2, 7))
    maps = attention_maps(model, {"idx": idx})
    assert len(maps) == 2
    with torch.no_grad():
        x = model.h[0].ln_1(model.wte(idx) + model.wpe(torch.arange(7)))
        query, key, _ = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in model.h[0].attn.c_attn(x).split(16, 2))
        scores = (query @ key.mT / 2).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(maps[0], scores.softmax(-1), atol=1e-6, rtol=0)


def test_torch_encoders_and_vision_transformers_have_maps():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    src, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    maps = attention_maps(encoder, {"src": src, "src_key_padding_mask": padding})
    first = encoder.layers[0].self_attn.eval()
    with torch.no_grad():
        expected = first(src, src, src, key_padding_mask=padding, average_attn_weights=False)[1]
    torch.testing.assert_close(maps[0], expected, atol=1e-6, rtol=0)
    assert [layer.shape for layer in attention_maps(ViT(), {"x": torch.randn(3, 3, 16, 16)})] == [(3, 4, 17, 17)] * 2


def test_what_has_no_attention_is_refused():
    with pytest.raises(ValueError, match="Linear ran without an attention call that torch shows"):
        attention_maps(nn.Linear(2, 2), {"input": torch.zeros(1, 2)})


def test_tiny_models_of_every_input_have_square_maps():
    for name in ("vit", "whisper", "bart", "clip"):
        model = tiny_model(name)
        calls, _ = run_with(model, tiny_inputs(name, model), lambda call, number: None)
        assert calls
        assert all(call.tokens > 1 for call in calls)


class Core(nn.Module):
    """Attention by a function of queries, keys and values (batch, n, heads, r)."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(12, 36), attend

    def forward(self, x):
        return self.attend(*(y.unflatten(-1, (3, 4)) for y in self.qkv(x).chunk(3, -1))).flatten(-2)


def listed(q, k, v):
    """Operands in a list, as in CvT."""
    weights = torch.einsum("bqhd,bkhd->bhqk", [q, k]).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", [weights, v])


def in_blocks(q, k, v):
    """Local attention in blocks, as in LongT5."""
    q, k, v = (x.unflatten(1, (2, -1)) for x in (q, k, v))
    weights = torch.einsum("...qhd,...khd->...hqk", q, k).softmax(-1)
    return torch.einsum("...hqk,...khd->...qhd", weights, v).flatten(1, 2)


def hidden_again(q, k, v):
    """Weights of hidden keys set to 0 once more, as in CPM-Ant."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    weights = (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1).masked_fill(future, 0.0)
    return (weights @ v).transpose(1, 2)


def heads_first(q, k, v):
    """Weights whose heads are moved before they meet values, as in Gemma 3n."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    weights = scores.softmax(-1).permute(1, 0, 2, 3).flatten(0, 1)
    return torch.bmm(weights, v.permute(2, 0, 1, 3).flatten(0, 1)).unflatten(0, (3, -1)).permute(1, 2, 0, 3)


def in_two_parts(q, k, v):
    """Weights of some keys, then of the others, as in Pegasus-X."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.mT).softmax(-1)
    return (weights[..., :2] @ v[..., :2, :] + weights[..., 2:] @ v[..., 2:, :]).transpose(1, 2)


@pytest.mark.parametrize("attend", [listed, in_blocks, hidden_again, heads_first, in_two_parts])
def test_values_are_those_that_the_weights_meet_or_are_not_known(attend):
    model, x = Core(attend).double().eval(), torch.randn(2, 6, 12, dtype=torch.float64)
    expected = model(x)
    with kq.listen(model, lambda call: {"output": call.output()} if call.value is not None else None):
        assert torch.allclose(model(x), expected)
    with kq.listen(model) as calls:
        model(x)
    assert [call.value is None for call in calls] == [attend in (heads_first, in_two_parts)]
    assert calls[0].weights().sum(-1).allclose(torch.ones((), dtype=torch.float64))
