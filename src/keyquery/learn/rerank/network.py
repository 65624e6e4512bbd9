"""The network of a Reranker (contextual similarity aggregation) and its losses.

A candidate is represented by its affinities to the anchors, not by its descriptor: any descriptor works, and rotations
of it change nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from keyquery.layers.blocks import Block

TAU = 2.0  # the temperature of the contrastive loss, as published
ALPHA = 0.2  # weight of the distance loss
# Defaults of a Reranker; here, since the command line shows them where scikit-learn is not installed.
TOP = 1024
ANCHORS, WIDTH = 96, 64  # with fewer than LARGE items
PUBLISHED_ANCHORS, PUBLISHED_WIDTH = 512, 768
LARGE = 50_000
STEPS = 400
KERNEL = "general"
CLAMP = 1e-4  # least squared distance: the root has no gradient at 0


class RerankNetwork(nn.Module):
    """Affinities (batch, n, anchors), row 0 of the query, to contextualised vectors (batch, n, width).

    A linear map and `depth` pre-norm blocks, without positions and final norm: equivariant to permutations of the rows.
    `back` maps vectors to affinities, for the distance loss only.
    """

    def __init__(self, anchors: int, width: int, depth: int, heads: int, kernel: str = "general") -> None:
        super().__init__()
        self.anchors = anchors
        self.tokens = nn.Linear(anchors, width)
        self.blocks = nn.ModuleList(Block(width, heads, kernel=kernel) for _ in range(depth))
        self.back = nn.Linear(width, anchors)

    def forward(self, affinity: Float[Tensor, "batch n anchors"]) -> Float[Tensor, "batch n width"]:
        """Refined vectors."""
        # Affinities differ in digits that half precision does not have: the residual stream stays float32.
        with torch.autocast(affinity.device.type, enabled=False):
            x = self.tokens(affinity)
        for block in self.blocks:
            x = block(x)
        return x


def affinities(rows: Float[Tensor, "batch n dim"], anchors: int) -> Float[Tensor, "batch n anchors"]:
    """Dot products of all rows, the query and its candidates, with the first `anchors` of them."""
    return rows @ rows[:, :anchors].mT


def cosines(x: Float[Tensor, "batch n width"]) -> Float[Tensor, "batch n"]:
    """Cosines of every row with row 0."""
    unit = normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)
    return (unit @ unit[:, 0].unsqueeze(-1)).squeeze(-1)


def distance(
    affinity: Float[Tensor, "batch n anchors"], restored: Float[Tensor, "batch n anchors"]
) -> Float[Tensor, " batch"]:
    """The mean over rows of ‖a/‖a‖ − b/‖b‖‖, between 0.01 and 2, so that refined vectors keep the affinities."""
    apart = normalize(affinity, dim=-1) - normalize(restored.to(affinity.dtype), dim=-1)
    return apart.square().sum(-1).clamp(min=CLAMP).sqrt().mean(-1)


def rerank_loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
    """L = L_con + α·L_dist of affinities (batch, n, anchors) and which of their rows are positives (batch, n).

    L_con = −log(Σ_{i positive} s_i / Σ_i s_i) with s_i = exp(cos(x_0, x_i)/τ); row 0 is a positive itself.
    """
    affinity, positive = batch
    x = network(affinity)
    back: Any = getattr(network, "module", network).back  # unwraps DistributedDataParallel
    with torch.autocast(affinity.device.type, enabled=False):
        restored = back(x.to(affinity.dtype))
        logits = cosines(x) / TAU
        contrastive = logits.logsumexp(-1) - logits.masked_fill(~positive, -math.inf).logsumexp(-1)
        return (contrastive + ALPHA * distance(affinity, restored)).mean()


def sizes_for(items: int) -> tuple[int, int]:
    """Anchors and width of a network that is trained on so many items."""
    return (PUBLISHED_ANCHORS, PUBLISHED_WIDTH) if items >= LARGE else (ANCHORS, WIDTH)


def check_anchors(anchors: int, top: int) -> None:
    """Raise if lists are shorter than the `anchors` − 1 candidates that anchors need."""
    if top < anchors - 1:
        raise ValueError(f"anchors is {anchors}, but lists have {top} candidates: use at most {top + 1} anchors")
