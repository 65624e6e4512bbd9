"""Models in plain PyTorch, as people write them: no config, no declaration of heads, names of their own."""

import torch
from torch import nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Causal self-attention, fused or written out."""

    def __init__(self, dim, n_head, fused):
        super().__init__()
        self.n_head, self.fused = n_head, fused
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, dim, n_head, fused):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), SelfAttention(dim, n_head, fused)
        self.ln_2, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x)).relu()


class GPT(nn.Module):
    """A small language model; it has more positions than tokens."""

    def __init__(self, tokens=60, dim=16, n_head=4, n_layer=2, context=128, fused=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(tokens, dim), nn.Embedding(context, dim)
        self.h = nn.ModuleList([Block(dim, n_head, fused) for _ in range(n_layer)])
        self.lm_head = nn.Linear(dim, tokens)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PatchAttention(nn.Module):
    """Attention of a vision Transformer, with its projections in one."""

    def __init__(self, dim, heads):
        super().__init__()
        self.num_heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, n, c))

    def attend(self, q, k, v):
        return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v


class ViT(nn.Module):
    """A vision Transformer: a class token, then patches."""

    def __init__(self, dim=16, heads=4, depth=2):
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, dim, 4, 4), nn.Parameter(torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList([PatchAttention(dim, heads) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x[:, 0])
