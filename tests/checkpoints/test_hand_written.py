"""nanoGPT, TransformerLens and llama2.c files against small models written here from their definitions."""

import struct
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, pad, silu

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
        x = pad(before, (0, folded.dim - before.shape[-1]), value=1.0)
        found = layer.scale * folded.scores(x).reshape(scores.shape)
        seen = [given - given.mean(-1, keepdim=True) for given in (found, scores)]  # softmax sees no more
        torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


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
        return layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = CausalSelfAttention(config)

    def forward(self, x):
        self.before, self.entered = layer_norm(x, x.shape[-1:], eps=1e-5), self.ln_1(x)
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
    expected = torch.einsum(
        "hdr,hre->hed", attention.W_V, attention.W_O
    )  # W_O·W_V, from what is read to what is written
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


# llama2.c, as its model.py and `legacy_export` have it


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self, d, hidden, heads, keys):
        super().__init__()
        self.heads, self.keys, self.r = heads, keys, d // heads
        self.ln_attention, self.ln_ffn = RMSNorm(d), RMSNorm(d)
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = (nn.Linear(d, keys * self.r, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(d, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, d, bias=False)

    def turned(self, x, turns):
        pairs = torch.view_as_complex(x.reshape(len(x), -1, self.r // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(2)

    def forward(self, x, turns):
        self.entered, n = self.ln_attention(x), len(x)
        q, k, v = (w(self.entered).view(n, -1, self.r) for w in (self.wq, self.wk, self.wv))
        q, k = self.turned(q, turns), self.turned(k, turns)
        k, v = (t.repeat_interleave(self.heads // self.keys, 1) for t in (k, v))
        self.scores = torch.einsum("nhr,mhr->hnm", q, k) / self.r**0.5
        hidden = torch.ones(n, n).triu(1).bool()
        seen = torch.einsum("hnm,mhr->nhr", self.scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + self.wo(seen.reshape(n, -1))
        y = self.ln_ffn(x)
        return x + self.w2(silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    sizes = (24, 20, 3, 4, 2, 30, 16)  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len

    def __init__(self):
        super().__init__()
        d, hidden, layers, heads, keys, vocabulary, length = self.sizes
        self.embedding, self.ln_last = nn.Embedding(vocabulary, d), RMSNorm(d)
        self.layers = nn.ModuleList([LlamaBlock(d, hidden, heads, keys) for _ in range(layers)])
        r = d // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, r, 2) / r))
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.turns[: len(ids), None])
        return self.ln_last(x)

    def export(self, path, shared=True):
        names = ["ln_attention", "wq", "wk", "wv", "wo", "ln_ffn", "w1", "w2", "w3"]
        parts = [self.embedding.weight, *(getattr(one, name).weight for name in names for one in self.layers)]
        parts += [self.ln_last.weight, self.turns.real, self.turns.imag, *([] if shared else [self.embedding.weight])]
        sizes = self.sizes if shared else (*self.sizes[:5], -self.sizes[5], self.sizes[6])
        data = b"".join(part.detach().contiguous().numpy().astype("<f4").tobytes() for part in parts)
        path.write_bytes(struct.pack("<7i", *sizes) + data)


@pytest.mark.parametrize("shared", [True, False])
def test_llama2c(shared, tmp_path):
    model, path = randomise(Llama()), tmp_path / "model.bin"
    model.export(path, shared)
    with torch.no_grad():
        model(torch.randint(0, 30, (9,)))
    heads, places = kq.read(path), torch.arange(9)
    assert (heads.family.name, len(heads)) == ("llama2c", 3)
    for layer, block in zip(heads, model.layers, strict=True):
        query, key = (layer.rope.rotate(t, places) for t in layer.project(block.entered))
        scores = layer.scale * (query @ key.mT).flatten(0, 1)
        torch.testing.assert_close(scores, block.scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.norm.gain, block.ln_attention.weight.detach())
        torch.testing.assert_close(heads.values(layer.index).value.flatten(0, 2), block.wv.weight.detach())
    torch.testing.assert_close(heads.embedding(), model.embedding.weight.detach())


def test_llama2c_files_that_are_not_read_say_what_they_are(tmp_path):
    path = tmp_path / "model.bin"
    Llama().export(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"begins like a llama2\.c file, but has \d+ bytes; its header says \d+"):
        kq.read(path)
    path.write_bytes(struct.pack("<2i", 0x616B3432, 2) + bytes(248))
    with pytest.raises(
        ValueError, match=r"is a llama2\.c file of version 2, which is not read: export it as version 0"
    ):
        kq.read(path)
