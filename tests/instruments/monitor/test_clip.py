"""QK-Clip: only heads above tau change, their largest logit becomes tau, in every layout."""

import copy
import dataclasses
import re

import pytest
import torch

import keyquery as kq
from keyquery.instruments.monitor.clip import clip_heads
from keyquery.proof.families import tiny_model
from tests.instruments.monitor.models import language_model, monitored

transformers = pytest.importorskip("transformers")
IDS = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(0))
BIASED = {"num_key_value_heads": 4, "attention_bias": True}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "MHA, packed": ("gpt2", NO_DROPOUT),
    "MHA, interleaved": ("gpt_neox", {}),
    "MHA, biased": ("llama", BIASED),
    "GQA": ("llama", {}),
    "MLA": ("deepseek", {}),
    **{f"kq {kernel}": (kernel, None) for kernel in ("general", "symmetric", "split", "psd")},
}


def made(kind, changes):
    """A model of four heads a layer: of a family, with these changes of its config, or of a kernel."""
    if changes is not None:
        return tiny_model(kind, **changes).double().train()
    model = language_model(kind)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    return model.double()


def record(model, *inputs, **options):
    """A monitor after one forward, and the largest logit of every head."""
    monitor = monitored(model)
    model(*inputs, **options)
    monitor.step()
    monitor.close()
    return monitor, torch.tensor(monitor.recorder.records[-1]["values"]["largest"])


@pytest.mark.parametrize("name", MODELS)
def test_clipped_heads_end_at_tau(name):
    model = made(*MODELS[name])
    monitor, before = record(model, IDS)
    weights = {part: weight.clone() for part, weight in model.named_parameters()}
    first = before[:4]  # a change in the first layer changes the inputs of the second
    tau = float(first.sort().values[1:3].mean())
    monitor.recorder.records[-1]["values"]["largest"][4:] = [0.0] * (len(before) - 4)
    clips = monitor.clip(tau)
    assert {clip["name"].rpartition(".")[2] for clip in clips} == {str(h) for h in range(4) if first[h] > tau > 0}
    assert torch.allclose(record(model, IDS)[1][:4], first.clamp(max=tau), rtol=1e-6)  # records have 7 digits
    assert monitor.clip(tau) == [], "a record is used once"
    changed = {part for part, weight in model.named_parameters() if not torch.equal(weight, weights[part])}
    assert changed
    assert all(re.search(r"\b0\b.*(attn|attention)", part) for part in changed), changed


def test_a_layer_that_cannot_be_clipped_leaves_all_others_alone():
    model = made("qwen3", {})
    heads = kq.read(model)
    plain = dataclasses.replace(heads[0], query_norm=None, key_norm=None)
    mixed = type("Mixed", (type(heads),), {"_read": lambda self, index: plain if index == 0 else heads[index]})
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    both = copy.copy(heads)
    both.__class__ = mixed
    with pytest.raises(ValueError, match="normalises its queries or keys"):
        clip_heads(model, both, {0: {0: 0.5}, 1: {0: 0.5}})
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"vdim": 24}, {"add_bias_kv": True}], ids=str)
def test_heads_of_torchs_own_attention_end_at_tau(options):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(32, 4, batch_first=True, **options).double().train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)
        if model.bias_k is not None:
            model.bias_k.mul_(10.0)  # the largest logits are those of the learned key
    query, key = torch.randn(2, 2, 9, 32).double()
    inputs = query, key, torch.randn(2, 9, options.get("vdim", 32)).double()
    monitor, before = record(model, *inputs, need_weights=False)
    tau = float(before.sort().values[1:3].mean())
    assert len(monitor.clip(tau)) == int((before > tau).sum()) > 0
    assert torch.allclose(record(model, *inputs, need_weights=False)[1], before.clamp(max=tau), rtol=1e-6)


def test_a_softcapped_head_ends_at_tau():
    model = made("gemma2", {"attn_logit_softcapping": 5.0, "num_hidden_layers": 1})
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.mul_(0.2)  # near the cap, seven digits of a record say little
    monitor, before = record(model, IDS)
    assert 2.5 < before.max() < 4.9
    assert len(monitor.clip(2.0)) == int((before > 2).sum()) > 0
    assert torch.allclose(record(model, IDS)[1], before.clamp(max=2.0), rtol=1e-6)


def t5(bias):
    """An encoder of two layers, and its attention with the biases by offset."""
    model = transformers.T5EncoderModel(tiny_model("t5", dropout_rate=0.0).config).double().train()
    attention = model.encoder.block[0].layer[0].SelfAttention
    with torch.no_grad():
        attention.relative_attention_bias.weight.fill_(bias)
        attention.q.weight.mul_(10)
    return model, attention


def test_a_relative_position_bias_is_not_scaled():
    torch.manual_seed(0)
    model, attention = t5(1.0)
    monitor, before = record(model, IDS)
    tau = float(before[:4].min()) / 2 + 0.5  # halfway to the bias, for the lowest head
    monitor.recorder.records[-1]["values"]["largest"][4:] = [0.0] * (len(before) - 4)
    assert len(monitor.clip(tau)) == 4
    assert torch.allclose(record(model, IDS)[1][:4], torch.tensor(tau))
    kept = attention.q.weight.clone()
    with pytest.warns(RuntimeWarning, match="its relative position bias alone exceeds 0.5"):
        assert record(model, IDS)[0].clip(0.5) == []
    assert torch.equal(attention.q.weight, kept)


def test_the_bound_of_a_bias_by_offset_adds_its_largest_entry():
    torch.manual_seed(0)
    model, attention = t5(0.0)
    table, bounds = attention.relative_attention_bias.weight, []
    for added in (0.0, 50.0):
        with torch.no_grad():
            table[:, 1] += added
        values = record(model, IDS)[0].recorder.records[-1]["values"]
        assert all(low <= high for low, high in zip(values["largest"], values["bound"], strict=True))
        bounds.append(values["bound"][:4])
    assert [b - a for a, b in zip(*bounds, strict=True)] == pytest.approx([0, 50, 0, 0], abs=1e-3)
