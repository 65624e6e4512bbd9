"""nanoGPT, TransformerLens and llama2.c files, made of the weights of transformers' GPT-2 and Llama."""

import copy
import itertools
import struct
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import keyquery as kq

pytest.importorskip("transformers", reason="the models need the extra hf")

from keyquery.proof.families import tiny_model
from tests.checkpoints.formats.gguf_models import pairs, tiny


def gpt2():
    return tiny_model("gpt2", scale_attn_by_inverse_layer_idx=False, layer_norm_epsilon=1e-5)


def assert_same(given, expected, offsets=(None,)):
    """Forms, scales, values and outputs of layers; those of GPT-2 and Llama are proven by their own scores."""
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert (one.causal, one.scale) == (other.causal, pytest.approx(other.scale))
        assert (one.norm.kind, one.norm.eps) == (other.norm.kind, other.norm.eps)
        for view, offset in itertools.product(("form", "folded"), offsets):
            forms = [(getattr(layer, view), layer.rope) for layer in (one, other)]
            dense = (form.dense() if offset is None else form.at(offset, rope).dense() for form, rope in forms)
            torch.testing.assert_close(*dense, rtol=1e-4, atol=1e-5)
    for one, other in zip(given.output, expected.output, strict=True):
        torch.testing.assert_close(one.dense(), other.dense(), rtol=1e-4, atol=1e-5)


# nanoGPT: GPT-2 with linear layers, a dataclass as config, and `model_args` beside the weights


@dataclass
class GPTConfig:
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool = True


def nanogpt(model):
    outer, facts = nn.Module(), model.config
    outer.transformer, outer.config = model, GPTConfig(facts.vocab_size, facts.n_layer, facts.n_head, facts.n_embd)
    for block in model.h:
        for name in ("c_attn", "c_proj"):
            stored = getattr(block.attn, name)
            linear = nn.Linear(*stored.weight.shape)
            linear.weight, linear.bias = nn.Parameter(stored.weight.detach().T), stored.bias
            setattr(block.attn, name, linear)
    return outer


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(prefix, tmp_path):
    model = gpt2()
    plain = copy.deepcopy(model)
    outer = nanogpt(model)
    state = {prefix + name: tensor for name, tensor in outer.state_dict().items()}
    torch.save({"model": state, "model_args": vars(outer.config), "iter_num": 7}, tmp_path / "ckpt.pt")
    for source in (tmp_path / "ckpt.pt", outer):
        heads = kq.read(source)
        assert heads.family.name == "nanogpt"
        assert heads.embedding_shape == tuple(model.wte.weight.shape)
        assert_same(heads, kq.read(plain))


# TransformerLens: (heads, d, r), and `_W_K` where keys are shared


def lens(model):
    """GPT-2 under TransformerLens' names, whose own weights are (d, 3·d)."""
    heads, width = model.config.n_head, model.config.n_embd
    state = {"embed.W_E": model.wte.weight}
    for number, block in enumerate(model.h):
        name, packed = f"blocks.{number}", block.attn.c_attn
        weights, biases = packed.weight.chunk(3, 1), packed.bias.chunk(3)
        for role, weight, bias in zip("QKV", weights, biases, strict=True):
            state[f"{name}.attn.W_{role}"] = weight.reshape(width, heads, -1).transpose(0, 1).contiguous()
            state[f"{name}.attn.b_{role}"] = bias.reshape(heads, -1)
        state |= {f"{name}.attn.W_O": block.attn.c_proj.weight.reshape(heads, -1, width)}
        state |= {f"{name}.attn.b_O": block.attn.c_proj.bias, f"{name}.attn.IGNORE": torch.tensor(-torch.inf)}
        state |= {f"{name}.ln1.w": block.ln_1.weight, f"{name}.ln1.b": block.ln_1.bias}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def test_transformer_lens(tmp_path):
    model, path = gpt2(), tmp_path / "lens.pt"
    torch.save(lens(model), path)
    heads = kq.read(path)
    assert (heads.family.name, heads[0].name) == ("transformer_lens", "blocks.0.attn")
    assert "a causal mask and a scale of 1/√r are assumed: there is no config" in heads[0].notes
    assert_same(heads, kq.read(model))
    torch.testing.assert_close(heads.values(0).output_bias, model.h[0].attn.c_proj.bias.detach())
    layer = kq.read(path, config={"attn_scale": 3.0, "attention_dir": "bidirectional", "n_heads": 4})[0]
    assert (layer.scale, layer.causal) == (pytest.approx(1 / 3), False)
    assert kq.read(path, config={"use_attn_scale": False})[0].scale == 1.0


def test_shared_keys_and_rotary_positions_of_transformer_lens(tmp_path):
    query, key = torch.randn(4, 20, 6), torch.randn(2, 20, 6)
    state = {"blocks.0.attn.W_Q": query, "blocks.0.attn._W_K": key, "blocks.0.attn._W_V": key}
    state |= {"blocks.0.ln1.w": torch.ones(20)}
    state |= {"blocks.0.attn.W_O": torch.randn(4, 6, 20), "blocks.0.attn.IGNORE": torch.tensor(-torch.inf)}
    state |= {"blocks.0.attn.b_Q": torch.zeros(4, 6), "blocks.0.attn._b_K": torch.zeros(2, 6)}
    state |= {f"blocks.0.attn.rotary_{part}": torch.zeros(16, 6) for part in ("sin", "cos")}
    torch.save(state, tmp_path / "lens.pt")
    (layer,) = kq.read(tmp_path / "lens.pt")
    for head in range(4):
        torch.testing.assert_close(layer.head(head).dense(), query[head] @ key[head // 2].T)
    assert layer.norm.kind == "rms"
    assert "rotary positions enter its scores and are not read" in layer.notes


# llama2.c: seven integers, then all weights in float32, as its `legacy_export` writes them


def export(model, path, shared=True):
    config, state = model.config, model.state_dict()
    heads, keys, layers = config.num_attention_heads, config.num_key_value_heads, range(config.num_hidden_layers)
    names = ["input_layernorm", *(f"self_attn.{role}_proj" for role in "qkvo"), "post_attention_layernorm"]
    names += [f"mlp.{role}_proj" for role in ("gate", "down", "up")]
    parts = [state["embed_tokens.weight"]]
    for name in names:
        count = {"self_attn.q_proj": heads, "self_attn.k_proj": keys}.get(name)
        weights = (state[f"layers.{layer}.{name}.weight"] for layer in layers)
        parts += [weight if count is None else pairs(weight, count) for weight in weights]
    rank, length, words = config.hidden_size // heads, config.max_position_embeddings, config.vocab_size
    parts += [state["norm.weight"], torch.zeros(length, rank), *([] if shared else parts[:1])]
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        len(layers),
        heads,
        keys,
        words if shared else -words,
        length,
    )
    path.write_bytes(struct.pack("<7i", *sizes) + b"".join(part.contiguous().numpy().tobytes() for part in parts))


@pytest.mark.parametrize("shared", [True, False])
def test_llama2c(shared, tmp_path):
    model, path = tiny("LlamaModel", rms_norm_eps=1e-5), tmp_path / "model.bin"
    export(model, path, shared)
    heads = kq.read(path)
    assert heads.family.name == "llama2c"
    assert_same(heads, kq.read(model), (0, -7))
    torch.testing.assert_close(heads.embedding(), model.embed_tokens.weight.detach())


def test_llama2c_files_that_are_not_read_say_what_they_are(tmp_path):
    path = tmp_path / "model.bin"
    export(tiny("LlamaModel"), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"begins like a llama2\.c file, but has \d+ bytes; its header says \d+"):
        kq.read(path)
    path.write_bytes(struct.pack("<2i", 0x616B3432, 2) + bytes(248))
    words = r"is a llama2\.c file of version 2, which is not read: export it as version 0"
    with pytest.raises(ValueError, match=words):
        kq.read(path)
