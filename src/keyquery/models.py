"""Small models that ship with the package."""

from __future__ import annotations

import torch
from torch import nn


def seeded(seed: int = 0, layers: int = 4, heads: int = 4, width: int = 128) -> nn.Module:
    """A small untrained Transformer encoder, the same for every run with the same seed.

    >>> sum(p.numel() for p in seeded().parameters())
    793088
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # One by one: nn.TransformerEncoder would start every layer from the same numbers.
        blocks = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
    return nn.Sequential(*blocks)
