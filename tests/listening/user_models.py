"""Attention as users write it: plain modules that know nothing of keyquery."""

import torch
from torch import nn
from torch.nn.functional import normalize, scaled_dot_product_attention

import keyquery as kq


class MinGPTAttention(nn.Module):
    def __init__(self, width, heads, window=None):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.window = heads, window

    def forward(self, x):
        batch, n, width = x.shape
        q, k, v = (t.view(batch, n, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(width, 2))
        if self.window:
            near = torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(1 - self.window)
            y = scaled_dot_product_attention(q, k, v, attn_mask=near)
        else:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, n, width))


class Block(nn.Module):
    def __init__(self, width, attn):
        super().__init__()
        self.ln, self.attn, self.mlp = nn.LayerNorm(width), attn, nn.Linear(width, width)

    def forward(self, x):
        x = x + self.attn(self.ln(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Embeddings and blocks of any attention."""

    def __init__(self, attentions, width=24, vocabulary=31):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(width, attn) for attn in attentions)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return x


class ViTAttention(nn.Module):
    def __init__(self, width, heads, qk_norm=False):
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        norm = nn.LayerNorm if qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(width // heads), norm(width // heads)

    def forward(self, x):
        batch, n, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = scaled_dot_product_attention(q * self.scale, k, v, scale=1.0)
        return self.proj(x.transpose(1, 2).reshape(batch, n, width))


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6, start=1.0):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((width,), start)), eps

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight


class LlamaAttention(nn.Module):
    def __init__(self, width, heads, groups, qk_norm=False, rope=None, repeat=True):
        super().__init__()
        self.heads, self.groups, self.rank, self.rope, self.repeat = heads, groups, width // heads, rope, repeat
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.rank, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (RMSNorm(self.rank) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x):
        batch, n, _ = x.shape
        q, k, v = (w(x).view(batch, n, -1, self.rank).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = (self.rope.rotate(t, torch.arange(n)) for t in (q, k))
        if self.repeat:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        return self.wo(y.transpose(1, 2).reshape(batch, n, -1))


class XAttention(nn.Module):
    """As x-transformers: l2-normed queries and keys with learned scales by head, and partial interleaved rotation."""

    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, heads * rank, bias=False) for _ in range(3))
        self.qk_norm_q_scale, self.qk_norm_k_scale = (nn.Parameter(torch.rand(heads, 1, rank) + 1) for _ in range(2))
        self.to_out, self.rope = nn.Linear(heads * rank, width, bias=False), kq.Rope(rank // 2, interleaved=True)

    def forward(self, x):
        batch, n, _ = x.shape
        q, k, v = (to(x).view(batch, n, self.heads, -1).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        q, k = normalize(q, dim=-1) * self.qk_norm_q_scale, normalize(k, dim=-1) * self.qk_norm_k_scale
        q, k = (self.rope.rotate(t, torch.arange(n)) for t in (q, k))
        y = scaled_dot_product_attention(q, k, v, scale=10.0)
        return self.to_out(y.transpose(1, 2).reshape(batch, n, -1))


class RawAttention(nn.Module):
    """Parameters without modules, (in, out), with biases that are added later."""

    def __init__(self, width, heads):
        super().__init__()
        self.n_head = heads
        for role in "qkvo":
            setattr(self, f"W_{role}", nn.Parameter(torch.randn(width, width) / 5))
            setattr(self, f"b_{role}", nn.Parameter(torch.randn(width)))

    def forward(self, x):
        batch, n, width = x.shape
        q, k, v = (x @ getattr(self, f"W_{role}") + getattr(self, f"b_{role}") for role in "qkv")
        q, k, v = (t.view(batch, n, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(batch, n, width) @ self.W_o + self.b_o
