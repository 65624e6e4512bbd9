"""Layouts that have no transformers model: torch's own attention, and timm's block restated."""

import pytest
import torch
from torch import nn

import keyquery as kq


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"vdim": 6}])
def test_scores_are_those_of_multihead_attention(options):
    attention = nn.MultiheadAttention(12, 3, batch_first=True, **options)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    x, value = torch.randn(1, 5, 12), torch.randn(1, 5, options.get("vdim", 12))
    _, expected = attention(x, x, value, average_attn_weights=False)
    (layer,) = kq.read(attention)
    form = layer.biased
    tokens = nn.functional.pad(x[0], (0, form.dim - 12), value=1.0)
    torch.testing.assert_close((form.scores(tokens) * layer.scale).softmax(-1), expected[0])
    query, key = layer.project(x[0])
    torch.testing.assert_close((query @ key.mT * layer.scale).softmax(-1).squeeze(1), expected[0])


class TimmAttention(nn.Module):
    """timm's vision attention, restated: one qkv, split as (3, heads, r), query and key norms of each head."""

    def __init__(self, dim, heads, normed):
        super().__init__()
        self.heads, self.rank = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(self.rank, eps=1e-6) if normed else nn.Identity()
        self.k_norm = nn.LayerNorm(self.rank, eps=1e-6) if normed else nn.Identity()

    def forward(self, x):
        batch, n, dim = x.shape
        query, key, value = self.qkv(x).reshape(batch, n, 3, self.heads, self.rank).permute(2, 0, 3, 1, 4).unbind(0)
        self.scores = self.q_norm(query) * self.rank**-0.5 @ self.k_norm(key).mT
        return self.proj((self.scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, n, dim))


class TimmBlock(nn.Module):
    def __init__(self, dim, heads, normed):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), TimmAttention(dim, heads, normed)

    def forward(self, x):
        return x + self.attn(self.norm1(x))


class TimmModel(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.blocks = nn.Sequential(*(TimmBlock(16, 4, normed) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)


@pytest.mark.parametrize("normed", [False, True])
def test_timm_blocks(normed):
    model = TimmModel(normed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.3)
    x = torch.randn(1, 5, 16)
    heads = kq.read(model, heads=4)
    assert heads.family.name == "timm"
    with torch.no_grad():
        for layer, block in zip(heads, model.blocks, strict=True):
            entered = block.norm1(x)
            out = block(x)
            query, key = layer.project(entered[0])
            torch.testing.assert_close((query @ key.mT * layer.scale).squeeze(1), block.attn.scores[0])
            if not normed:
                before = (entered[0] - block.norm1.bias) / block.norm1.weight
                tokens = nn.functional.pad(before, (0, 1), value=1.0)
                both = layer.folded.scores(tokens) * layer.scale, block.attn.scores[0]
                seen = [scores - scores.mean(-1, keepdim=True) for scores in both]  # softmax sees no more
                torch.testing.assert_close(*seen)
            x = out
