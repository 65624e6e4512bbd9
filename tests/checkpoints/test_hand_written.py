"""nanoGPT, TransformerLens and llama2.c files against small models written here from their definitions."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keyquery as kq


def randomise(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(1 + noise if "ln" in name and name.endswith(("w", "weight")) else noise)
    return model.eval()


def assert_scores(heads, inputs, expected):
    """Scores of our layers, in all views that should agree, against those that the model computed."""
    assert len(heads) == len(inputs) == len(expected)
    for layer, (before, entered), scores in zip(heads, inputs, expected, strict=True):
        query, key = layer.project(entered)
        torch.testing.assert_close(layer.scale * (query @ key.mT).flatten(0, 1), scores, rtol=1e-4, atol=1e-5)
        folded = layer.folded
        x = F.pad(before, (0, folded.dim - before.shape[-1]), value=1.0)
        torch.testing.assert_close(layer.scale * folded.scores(x).reshape(scores.shape), scores, rtol=1e-4, atol=1e-5)


# nanoGPT, as its model.py has it


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 30
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 24
    bias: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        length, width = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=1)
        q, k, v = (t.view(length, self.n_head, width // self.n_head).transpose(0, 1) for t in (q, k, v))
        self.scores = q @ k.transpose(-2, -1) / (width // self.n_head) ** 0.5
        attention = self.scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
        return self.c_proj((attention @ v).transpose(0, 1).reshape(length, width))


class LayerNorm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = CausalSelfAttention(config)

    def forward(self, x):
        self.before, self.entered = F.layer_norm(x, x.shape[-1:], eps=1e-5), self.ln_1(x)
        return x + self.attn(self.entered)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            }
        )

    def forward(self, ids):
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(len(ids)))
        for block in self.transformer.h:
            x = block(x)
        return x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(bias, prefix, tmp_path):
    model = randomise(GPT(GPTConfig(bias=bias)))
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state, "model_args": vars(model.config), "iter_num": 7}, tmp_path / "ckpt.pt")
    with torch.no_grad():
        model(torch.randint(0, 30, (9,)))
    blocks = model.transformer.h
    inputs, scores = [(b.before, b.entered) for b in blocks], [b.attn.scores for b in blocks]
    for source in (tmp_path / "ckpt.pt", model):
        heads = kq.read(source)
        assert heads.family.name == "nanogpt"
        assert all(layer.causal for layer in heads)
        assert_scores(heads, inputs, scores)
        value, out = heads.values(1), blocks[1].attn.c_proj.weight
        torch.testing.assert_close(value.output.reshape(24, 24), out.mT.detach())
    assert kq.read(tmp_path / "ckpt.pt").embedding_shape == (30, 24)


def test_a_bare_nanogpt_state_dict_needs_heads(tmp_path):
    model = GPT(GPTConfig())
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match="does not say how many heads it has"):
        kq.read(tmp_path / "bare.pt")[0]
    assert kq.read(tmp_path / "bare.pt", heads=4)[0].form.batch == (4,)


# TransformerLens, as its components have it


class LensNorm(nn.Module):
    def __init__(self, width, rms):
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))
        self.b = None if rms else nn.Parameter(torch.zeros(width))

    def plain(self, x):
        x = x if self.b is None else x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def forward(self, x):
        x = self.plain(x) * self.w
        return x if self.b is None else x + self.b


class LensAttention(nn.Module):
    def __init__(self, heads, keys, d, r):
        super().__init__()
        self.repeats = heads // keys
        under = "_" if self.repeats > 1 else ""
        sizes = {"W_Q": (heads, d, r), "W_O": (heads, r, d), "b_Q": (heads, r), "b_O": (d,)}
        sizes |= {under + name: (keys, d, r) for name in ("W_K", "W_V")}
        sizes |= {under + name: (keys, r) for name in ("b_K", "b_V")}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))
        self.under = under
        self.register_buffer("mask", torch.ones(16, 16).tril().bool())
        self.register_buffer("IGNORE", torch.tensor(-torch.inf))

    def forward(self, x):
        def project(letter, under):
            weight, bias = getattr(self, f"{under}W_{letter}"), getattr(self, f"{under}b_{letter}")
            return torch.einsum("nd,hdr->hnr", x, weight) + bias[:, None]

        q, k, v = project("Q", ""), project("K", self.under), project("V", self.under)
        k, v = (t.repeat_interleave(self.repeats, 0) for t in (k, v))
        self.scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        n = len(x)
        self.z = self.scores.masked_fill(~self.mask[:n, :n], -torch.inf).softmax(-1) @ v
        return torch.einsum("hnr,hrd->nd", self.z, self.W_O) + self.b_O


class LensBlock(nn.Module):
    def __init__(self, heads, keys, d, r, rms):
        super().__init__()
        self.ln1, self.attn = LensNorm(d, rms), LensAttention(heads, keys, d, r)

    def forward(self, x):
        self.before, self.entered = self.ln1.plain(x), self.ln1(x)
        return x + self.attn(self.entered)


class Lens(nn.Module):
    def __init__(self, heads, keys, d, r, rms):
        super().__init__()
        self.embed = nn.Module()
        self.embed.W_E = nn.Parameter(torch.zeros(30, d))
        self.blocks = nn.ModuleList([LensBlock(heads, keys, d, r, rms) for _ in range(2)])

    def forward(self, ids):
        x = self.embed.W_E[ids]
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("keys", "rms"), [(4, False), (2, True)])
def test_transformer_lens(keys, rms, tmp_path):
    model = randomise(Lens(4, keys, 20, 6, rms))
    torch.save(model.state_dict(), tmp_path / "lens.pt")
    with torch.no_grad():
        model(torch.randint(0, 30, (9,)))
    blocks = model.blocks
    for source in (tmp_path / "lens.pt", model):
        heads = kq.read(source)
        assert heads.family.name == "transformer_lens"
        assert_scores(heads, [(b.before, b.entered) for b in blocks], [b.attn.scores for b in blocks])
        assert heads[0].name == "blocks.0.attn"
        assert heads[0].causal
        assert heads.embedding_shape == (30, 20)
    assert "a causal mask and a scale of 1/√r are assumed: there is no config" in heads[0].notes


def test_transformer_lens_values_and_outputs(tmp_path):
    model = randomise(Lens(4, 4, 20, 6, False))
    torch.save(model.state_dict(), tmp_path / "lens.pt")
    maps = list(kq.read(tmp_path / "lens.pt").output)
    attention = model.blocks[1].attn
    expected = torch.einsum("hdr,hre->hed", attention.W_V, attention.W_O)  # W_O·W_V, from what is read to what is written
    torch.testing.assert_close(maps[1].dense(), expected.detach())
    carried = kq.read(tmp_path / "lens.pt").values(0)
    torch.testing.assert_close(carried.value_bias.flatten(0, 1), model.blocks[0].attn.b_V.detach())
    torch.testing.assert_close(carried.output_bias, model.blocks[0].attn.b_O.detach())


def test_a_config_of_transformer_lens_counts(tmp_path):
    model = randomise(Lens(4, 4, 20, 6, False))
    torch.save(model.state_dict(), tmp_path / "lens.pt")
    layer = kq.read(tmp_path / "lens.pt", config={"attn_scale": 3.0, "attention_dir": "bidirectional", "n_heads": 4})[0]
    assert layer.scale == pytest.approx(1 / 3)
    assert not layer.causal
    assert kq.read(tmp_path / "lens.pt", config={"use_attn_scale": False})[0].scale == 1.0


def test_rotary_positions_of_transformer_lens_are_noted(tmp_path):
    state = Lens(4, 4, 20, 6, False).state_dict()
    state |= {f"blocks.{i}.attn.rotary_{part}": torch.zeros(16, 6) for i in range(2) for part in ("sin", "cos")}
    torch.save(state, tmp_path / "lens.pt")
    assert "rotary positions enter its scores and are not read" in kq.read(tmp_path / "lens.pt")[0].notes
