"""The published model of the Long Range Arena, and what the released code of Primal-Attention does differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from keyquery.layers import Encoder
from keyquery.learn.layers import PrimalAttention, regularizer

WIDTH, DEPTH, HEADS, HIDDEN, DROPOUT = 64, 2, 2, 128, 0.1


class Classifier(nn.Module):
    """Tokens to logits: learned position embeddings, pre-norm blocks, mean pooling over real tokens, a two-layer head.

    The published model also pools over padding. `primal` holds rank and eta of primal blocks.
    """

    def __init__(
        self, attention: str, vocabulary: int, length: int, classes: int, primal: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"hidden": HIDDEN, "dropout": DROPOUT}
        if attention != "general":
            options["primal"] = primal
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(torch.empty(length, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)
        self.body = Encoder(WIDTH, DEPTH, HEADS, kernel=attention, **options)
        self.head = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
        for weight in (self.tokens.weight, self.places):
            nn.init.normal_(weight, std=0.02)

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


def start_as_published(model: nn.Module) -> None:
    """Initialise primal layers with the smaller weights of the released code.

    There, columns of We and Wr have length 1/√rank, not 1, and Λ = u² with u uniform on (0, 1), not 1/rank.
    """
    with torch.no_grad():
        for layer in _primal(model):
            layer.directions.mul_(layer.rank**-0.5)
            layer.log_lambda.copy_(2 * torch.rand_like(layer.log_lambda).clamp(min=1e-3).log())


def published_regularizer(model: nn.Module) -> Float[Tensor, ""]:
    """The mean of the losses of a model's primal layers, as the released code has it; `kq.regularizer` is their sum."""
    return regularizer(model) / max(len(_primal(model)), 1)


def _primal(model: nn.Module) -> list[PrimalAttention]:
    return [layer for layer in model.modules() if isinstance(layer, PrimalAttention)]
