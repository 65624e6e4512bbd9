"""The published Long Range Arena model: two blocks of width 64; and an eager softmax for the timing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.functional import dropout

from keyquery.layers import Encoder

WIDTH, DEPTH, HEADS, HIDDEN, DROPOUT = 64, 2, 2, 128, 0.1
ATTENTIONS = ("primal", "primal+", "general")  # general: softmax, fused
EAGER = "eager"  # softmax that materialises every score, as in the published timing


class Classifier(nn.Module):
    """Tokens to logits: learned position embeddings, pre-norm blocks, mean pooling over real tokens, a two-layer head.

    The published model also pools over padding. `primal` holds rank and eta of primal blocks.
    """

    def __init__(
        self, attention: str, vocabulary: int, length: int, classes: int, primal: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        kernel = "general" if attention == EAGER else attention
        options: dict[str, Any] = {"hidden": HIDDEN, "dropout": DROPOUT}
        if kernel != "general":
            options["primal"] = primal
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(torch.empty(length, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)
        self.body = Encoder(WIDTH, DEPTH, HEADS, kernel=kernel, **options)
        self.head = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
        for weight in (self.tokens.weight, self.places):
            nn.init.normal_(weight, std=0.02)
        if attention == EAGER:
            for block in self.body.blocks:
                block.attention = Eager()

    def forward(
        self, tokens: Integer[Tensor, "batch n"], mask: Bool[Tensor, "batch n"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """Logits; `mask` is True for real tokens; None: all are real."""
        x = self.dropout(self.tokens(tokens.int()) + self.places[: tokens.shape[1]])
        x = self.body(x, mask)
        if mask is None:
            return self.head(x.mean(1))
        real = mask.unsqueeze(-1)
        return self.head(x.where(real, 0.0).sum(1) / real.sum(1))


class Eager(nn.Module):
    """Eager softmax attention: scores, their softmax and its dropout are all materialised, n × n per head."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"] | None = None, is_causal: bool = False
    ) -> Float[Tensor, "batch n dim"]:
        """Attend; every token attends to every real one."""
        query, key, value = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT * (WIDTH // HEADS) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        weights = dropout(scores.softmax(-1), DROPOUT, self.training)
        return self.output((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))
