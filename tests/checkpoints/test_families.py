"""Every family against the real model's own scores, in every variant that its files come in."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", reason="the spy needs the extra hf")

from keyquery.checkpoints.family import families
from keyquery.checkpoints.locations import recognise
from keyquery.checkpoints.reader import _refused
from keyquery.proof.families import tiny_model
from keyquery.testing import check_family

PROVEN = [name for name, family in families().items() if family.tiny]


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


MOE = {"num_experts_per_tok": 1, "num_local_experts": 2, "num_experts": 2}
QWEN_MOE = {**MOE, "model": "Qwen2MoeModel", "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SMOL = {"model": "SmolLM3Model", "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONG = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
LONG |= rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0] * 4)
YARN = rope("yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
VARIANTS = {
    "falcon, multi-query": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon, one key a query": ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}),
    "gpt2, unscaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": False}),
    "phi, query and key norms": ("phi", {"qk_layernorm": True}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, linear": ("llama", rope("linear", factor=4.0)),
    "llama, llama3": ("llama", LLAMA3),
    "llama, yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "phi3, longrope": (
        "phi3",
        {**LONG, **rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0] * 4)},
    ),
    "deepseek v2": ("deepseek", {"model": "DeepseekV2Model"}),
    "deepseek, no query latent": ("deepseek", {"q_lora_rank": None}),
    "deepseek, pairs apart": ("deepseek", {"rope_interleave": False}),
    "deepseek, yarn": ("deepseek", YARN),
    "opt, post-norm": ("opt", {"do_layer_norm_before": False}),
    "wav2vec2, pre-norm": ("wav2vec2", {"do_stable_layer_norm": True}),
    "deberta, no positions": ("deberta_v2", {"relative_attention": False, "pos_att_type": []}),
    "gpt_neox, all rotary": ("gpt_neox", rope("default", partial_rotary_factor=1.0)),
    "modernbert, local and global": ("modernbert", {"num_hidden_layers": 4}),
    "granite": ("llama", {"model": "GraniteMoeModel", "attention_multiplier": 0.3, **MOE}),
    "smollm3, some layers unturned": ("llama", SMOL),
    "qwen2, mixture": ("qwen2", QWEN_MOE),
    "umt5": ("t5", {"model": "UMT5Model"}),
    "stablelm, biases": ("stablelm", {"use_qkv_bias": True}),
    "qwen3, no groups": ("qwen3", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", PROVEN)
def test_family(name):
    check_family(name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(variant):
    name, changes = VARIANTS[variant]
    check_family(name, **changes)


def test_check_family_finds_a_wrong_fact(monkeypatch):
    facts = families()["gpt_neox"].attention[0]
    object.__setattr__(facts, "order", "blocks")  # what published code takes it for
    try:
        with pytest.raises(AssertionError, match="differ"):
            check_family("gpt_neox")
    finally:
        object.__setattr__(facts, "order", "groups")


@pytest.mark.parametrize(("fact", "wrong"), [("gain_offset", 0.0), ("norm_kind", "layer")])
def test_check_family_finds_a_wrong_norm(fact, wrong):
    facts = families()["gemma"].attention[0]
    right = getattr(facts, fact)
    object.__setattr__(facts, fact, wrong)
    try:
        with pytest.raises(AssertionError, match="input_layernorm gives to"):
            check_family("gemma")
    finally:
        object.__setattr__(facts, fact, right)


def test_grouped_heads_paired_wrongly_would_be_found(monkeypatch):
    """Query head h looks at key head h // group; the published code has h mod n_kv."""
    from keyquery.checkpoints import layouts

    right = layouts._apart

    def wrong(place, source, heads):
        weights = right(place, source, heads)
        groups, shared = weights.query.shape[:2]
        query = weights.query.flatten(0, 1).unflatten(0, (shared, groups)).transpose(0, 1)
        return layouts.Projections(query, weights.key, weights.query_bias, weights.key_bias)

    monkeypatch.setattr(layouts, "_apart", wrong)
    with pytest.raises(AssertionError, match="differ"):
        check_family("llama", num_attention_heads=8, num_key_value_heads=2)


@pytest.mark.parametrize("cls", ["T5Model", "MT5Model", "UMT5Model"])
def test_each_block_has_the_bias_that_its_model_adds(cls, tmp_path):
    """T5 and mT5 share block 0's table; every block of UMT5 has its own. The oracle is the model's `compute_bias`."""
    import keyquery as kq

    model = tiny_model("t5", model=cls, num_layers=3)
    model.save_pretrained(tmp_path)
    offsets = torch.arange(40) - torch.arange(40)[:, None]
    for heads in (kq.read(tmp_path), kq.read(model)):
        compared = 0
        for layer in heads:
            if layer.kind == "cross":
                assert heads.position_bias(layer, offsets.flatten()) is None
                continue
            stack = model.decoder if layer.causal else model.encoder
            own = model.get_submodule(layer.name)
            table_of = own if own.has_relative_attention_bias else stack.block[0].layer[0].SelfAttention
            expected = table_of.compute_bias(40, 40)[0].detach().double()
            given = heads.position_bias(layer, offsets.flatten()).reshape(-1, 40, 40)
            visible = offsets <= 0 if layer.causal else torch.ones_like(offsets, dtype=torch.bool)
            torch.testing.assert_close(given[:, visible], expected[:, visible])
            compared += 1
        assert compared == 6


def test_falcon_alibi_is_scaled_like_the_score(monkeypatch, tmp_path):
    """Its eager attention adds ALiBi twice, so the mask that it hands to fused attention is the witness."""
    import keyquery as kq

    model = tiny_model("falcon", alibi=True)
    model.config._attn_implementation = "sdpa"
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def witness(query, key, value, attn_mask=None, **rest):
        seen.append(attn_mask)
        return fused(query, key, value, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", witness)
    with torch.no_grad():
        model(torch.randint(3, 60, (1, 6)))
    with pytest.raises(ValueError, match="alibi = True"):  # rounded, it is not read exactly
        kq.read(model)
    heads = kq.read(model, unproven=True)
    layer = heads[0]
    assert layer.rope is None
    bias = heads.position_bias(layer, torch.arange(6) - 5)  # of the last query, which sees all
    given = seen[0][0, :, -1].double()
    torch.testing.assert_close(given - given[:, -1:], bias - bias[:, -1:], rtol=1e-2, atol=1e-2)  # slopes are bfloat16


ALIKE = ("mistral", "qwen2", "roberta", "electra", "gemma3", "siglip")
RECOGNISED = [name for name in PROVEN if name not in ALIKE and families()[name].by_names]


@pytest.mark.parametrize("name", RECOGNISED)
def test_families_are_recognised_by_their_names_alone(name):
    assert recognise(dict.fromkeys(tiny_model(name).state_dict())).name == name


def test_no_type_is_claimed_by_two_architectures_or_refused_as_well():
    claims = Counter(name for family in families().values() for name in family.model_types)
    assert [name for name, count in claims.items() if count > 1] == []
    assert [name for name in _refused() if claims[name]] == []
