"""QK-Clip: only heads above tau change, their largest logit becomes tau, in every layout."""

import copy
import dataclasses

import pytest
import torch

import keyquery as kq
from keyquery.instruments.monitor.clip import clip_heads
from keyquery.layers import LanguageModel, Shape

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(kv_heads):
    config = transformers.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=kv_heads, attention_bias=True)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def neox():
    config = transformers.GPTNeoXConfig(**SIZES, intermediate_size=48, bos_token_id=0, eos_token_id=0)
    return transformers.GPTNeoXForCausalLM(config)


def mla():
    latent = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 2}
    groups = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV3Config(
        **SIZES, **latent, **experts, **groups, intermediate_size=48, num_key_value_heads=4
    )
    return transformers.DeepseekV3ForCausalLM(config)


def own(kernel):
    return LanguageModel(Shape(60, 32, 2, 4, 32, True, kernel, rope=True))


MODELS = {
    "MHA, packed": gpt2,
    "MHA, interleaved": neox,
    "MHA, biased": lambda: llama(4),
    "GQA": lambda: llama(2),
    "MLA": mla,
    "kq general": lambda: own("general"),
    "kq symmetric": lambda: own("symmetric"),
    "kq split": lambda: own("split"),
    "kq psd": lambda: own("psd"),
}


def record(model, *inputs, **options):
    """A monitor after one forward, and the largest logit of every head."""
    monitor = kq.Monitor(model, every=1, strict=True, on_alarm=lambda alarm: None)
    model(*inputs, **options)
    monitor.step()
    monitor.close()
    return monitor, torch.tensor(monitor.recorder.records[-1]["values"]["largest"])


@pytest.mark.parametrize("name", MODELS)
def test_clipped_heads_end_at_tau(name):
    torch.manual_seed(0)
    model, ids = MODELS[name]().double().train(), torch.randint(60, (2, 12))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    monitor, before = record(model, ids)
    first = before[:4]  # a change in the first layer changes the inputs of the second
    tau = float(first.sort().values[1:3].mean())
    monitor.recorder.records[-1]["values"]["largest"][4:] = [0.0] * 4
    clips = monitor.clip(tau)
    assert {clip["name"].rpartition(".")[2] for clip in clips} == {str(h) for h in range(4) if first[h] > tau > 0}
    assert torch.allclose(record(model, ids)[1][:4], first.clamp(max=tau), rtol=1e-6)  # records have 7 digits
    assert monitor.clip(tau) == [], "a record is used once"


def test_biases_of_queries_and_keys_are_scaled_with_their_weights():
    torch.manual_seed(0)
    model = llama(4)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.bias.normal_()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    clip_heads(model, kq.read(model), {0: {2: 0.25}})
    rows = torch.ones(32)
    rows[16:24] = 0.5
    for name, weight in model.named_parameters():
        scaled = name.startswith("model.layers.0.self_attn.") and ("q_proj" in name or "k_proj" in name)
        factor = rows if weight.ndim == 1 else rows[:, None]
        assert torch.equal(weight, before[name] * factor if scaled else before[name]), name


def test_a_layer_that_cannot_be_clipped_leaves_all_others_alone():
    config = transformers.Qwen3Config(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8)
    model = transformers.Qwen3ForCausalLM(config)
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
    torch.manual_seed(0)
    more = {"intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8, "attn_logit_softcapping": 5.0}
    config = transformers.Gemma2Config(**{**SIZES, "num_hidden_layers": 1}, **more, attn_implementation="eager")
    model, ids = transformers.Gemma2ForCausalLM(config).double().train(), torch.randint(60, (2, 12))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(600.0)
    monitor, before = record(model, ids)
    assert 2.5 < before.min() <= before.max() < 5
    assert len(monitor.clip(2.0)) == 4
    assert torch.allclose(record(model, ids)[1], torch.tensor(2.0))


def t5(bias, layers=1):
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": layers, "num_heads": 4}
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes, dropout_rate=0)).double().train()
    attention = model.encoder.block[0].layer[0].SelfAttention
    with torch.no_grad():
        attention.relative_attention_bias.weight.fill_(bias)
        attention.q.weight.mul_(10)
    return model, attention


def test_a_relative_position_bias_is_not_scaled():
    torch.manual_seed(0)
    (model, attention), ids = t5(1.0), torch.randint(60, (2, 12))
    monitor, before = record(model, ids)
    tau = float(before.min()) / 2 + 0.5  # halfway to the bias, for the lowest head
    assert len(monitor.clip(tau)) == 4
    assert torch.allclose(record(model, ids)[1], torch.tensor(tau))
    kept = attention.q.weight.clone()
    with pytest.warns(RuntimeWarning, match="its relative position bias alone exceeds 0.5"):
        assert record(model, ids)[0].clip(0.5) == []
    assert torch.equal(attention.q.weight, kept)


def test_the_bound_of_a_bias_by_offset_adds_its_largest_entry():
    torch.manual_seed(0)
    model, attention = t5(0.0, layers=2)
    table = attention.relative_attention_bias.weight
    ids, bounds = torch.randint(60, (2, 12)), []
    for added in (0.0, 50.0):
        with torch.no_grad():
            table[:, 1] += added
        values = record(model, ids)[0].recorder.records[-1]["values"]
        assert all(low <= high for low, high in zip(values["largest"], values["bound"], strict=True))
        bounds.append(values["bound"][:4])
    assert [b - a for a, b in zip(*bounds, strict=True)] == pytest.approx([0, 50, 0, 0], abs=1e-3)
