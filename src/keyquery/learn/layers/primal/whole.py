"""The whole layer as one autograd function, where the Triton kernels can compute it so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyquery.learn.layers.primal.dispatch import choose
from keyquery.learn.layers.primal.inputs import untouched, working_dtype
from keyquery.learn.layers.primal.objective import Batch


def fits(layer: Any, x: Tensor) -> bool:
    """Whether `at_once` computes a `PrimalAttention` on x without padding: in training, with nothing replaced."""
    if layer.loss != "paper" or not layer.data_dependent or layer.features is not None or x.numel() == 0:
        return False
    if not (torch.is_grad_enabled() and (x.requires_grad or layer.directions.requires_grad)):
        return False  # ksvd() then needs Gram matrices
    if not (untouched(layer.query_key) and untouched(layer.concat) and untouched(layer.output)):
        return False
    return choose(layer.impl, x, max(layer.head_dim, layer.rank), working_dtype(x)) == "triton"


def at_once(layer: Any, x: Tensor) -> tuple[Tensor, Batch]:
    """The output, and the batch with its loss."""
    from keyquery.learn.layers.primal.kernels.whole import Weights, attend  # imports triton, an optional dependency

    directions, first, second, third = layer.directions, layer.query_key, layer.concat, layer.output
    maps = first.weight, first.bias, second.weight, second.bias, third.weight, third.bias
    own = Weights(directions, layer.log_lambda, *maps)
    eta = layer.eta or 1.0
    out, loss, energy, weights = attend(x, own, layer.feature, eta, working_dtype(x))
    rows = min(directions.shape[2], x.shape[1])
    return out, Batch(x.shape[1], None, energy, weights, rows=rows, loss=loss, eta=eta)
