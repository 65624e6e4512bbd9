"""Ridge regression of class indicators, with penalty and temperature chosen by leave-one-out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn.functional import one_hot

PENALTIES = torch.logspace(-4, 2, 19, dtype=torch.float64)
TEMPERATURES = torch.logspace(-1.5, 1, 40, dtype=torch.float64)
PENALTY, TEMPERATURE = 1e-2, 0.3  # if every class has one sample, which leave-one-out can never get right
TINY = 1e-9


class Ridge(NamedTuple):
    """A linear classifier: p = softmax((features @ weight + bias) / temperature)."""

    weight: Float[Tensor, "features classes"]
    bias: Float[Tensor, " classes"]
    temperature: float
    penalty: float
    loss: float  # leave-one-out cross-entropy of classes with two samples or more, in nats; NaN if there are none


def fit_ridge(
    features: Float[Tensor, "n features"], target: Int[Tensor, " n"], sample_weight: Float64[Tensor, " n"]
) -> Ridge:
    """Weighted ridge regression of ±1 indicators on standardised features, in the dual if there are fewer samples.

    With Z the standardised features, rows scaled by √weight, and Z Zᵀ = U diag(e) Uᵀ, predictions are
    H Y with H = U diag(e/(e + penalty)) Uᵀ + the mean's share, and leaving sample i out gives the residual
    (y − Hy)_i / (1 − H_ii). Penalty and temperature minimise the cross-entropy of those predictions, where 1/(n + 2) of
    every label is spread over all classes, similar to Platt scaling: n samples without an error prove no certainty.
    """
    share = sample_weight / sample_weight.sum()
    mean = (share.to(features) @ features).double()
    spread = features.std(0, correction=0).double()  # without weights, which would enlarge what only light samples have
    scale = torch.where(spread > 1e-6, spread, torch.inf) * features.shape[1] ** 0.5  # constant features count 0
    root = sample_weight.sqrt()[:, None]
    Z = root * ((features - mean.to(features)).double() / scale)
    Y = 2 * one_hot(target).double() - 1
    centre = share @ Y
    e, U = _decomposed(Z)
    projected = U.T @ (root * (Y - centre))
    doubt = 1 / (len(Y) + 2)
    penalties, temperatures = PENALTIES.to(Z.device), TEMPERATURES.to(Z.device)
    judged = share * (target.bincount()[target] > 1)
    best = Ridge(Z, centre, TEMPERATURE, PENALTY, float("inf") if judged.any() else float("nan"))
    judged = judged / judged.sum()
    for penalty in penalties:
        shrunk = e / (e + penalty)
        leverage = U.square() @ shrunk + share
        residual = (Y - centre) - (U @ (shrunk[:, None] * projected)) / root
        left_out = Y - residual / (1 - leverage).clamp(min=TINY)[:, None]
        scores = left_out / temperatures[:, None, None]
        right = scores.gather(-1, target.expand(len(temperatures), -1).unsqueeze(-1)).squeeze(-1)
        losses = (scores.logsumexp(-1) - (1 - doubt) * right - doubt * scores.mean(-1)) @ judged
        lowest = int(losses.argmin())
        if losses[lowest] < best.loss:
            best = best._replace(
                temperature=float(temperatures[lowest]), penalty=float(penalty), loss=float(losses[lowest])
            )
    coefficients = Z.T @ (U @ (projected / (e + best.penalty)[:, None]))
    weight = coefficients / scale[:, None]
    return best._replace(weight=weight, bias=centre - mean @ weight)


def _decomposed(Z: Float64[Tensor, "n features"]) -> tuple[Float64[Tensor, " r"], Float64[Tensor, "n r"]]:
    """Eigenvalues and eigenvectors of Z Zᵀ, from the smaller of its two Gram matrices."""
    if len(Z) <= Z.shape[1]:
        values, vectors = torch.linalg.eigh(Z @ Z.T)
        return values.clamp(min=0), vectors
    values, vectors = torch.linalg.eigh(Z.T @ Z)
    kept = values > TINY * values[-1]
    return values[kept], Z @ vectors[:, kept] / values[kept].sqrt()
