"""What the released code of Primal-Attention does differently: initialisation and the mean of losses."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.learn.layers import PrimalAttention, regularizer


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
