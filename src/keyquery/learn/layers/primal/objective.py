"""The losses of Primal-Attention and the KSVD of its kernel, computed from p×p Gram matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.reading import Reading

LOSSES = ("paper", "ksvd")
SHARE = 0.1  # weight of the KKT residual, which identifies the singular triples; the reconstruction does not


class Batch(NamedTuple):
    """What the losses need of a batch; Gram matrices, projection weights and f(X) are for "ksvd" only."""

    tokens: Float[Tensor, " batch"] | int
    directions: Float[Tensor, "2 heads rows s"]  # those in use by any sample
    log_lambda: Float[Tensor, "heads s"]
    energy: Float[Tensor, "2 batch heads s"]  # Σe² and Σr² over tokens
    used: Bool[Tensor, "batch rows"] | None = None  # of each sample; None: all
    weights: Float[Tensor, "2 batch heads p s"] | None = None
    grams: Float[Tensor, "2 batch heads p p"] | None = None
    sample: Float[Tensor, "batch heads rows p"] | None = None  # f(X) with unused rows 0; None: the identity


def penalty(batch: Batch, loss: str) -> Float[Tensor, ""]:
    """Mean over samples and heads of J², or of the reconstruction error; empty samples are ignored."""
    values = objective(batch).square() if loss == "paper" else reconstruction(batch)
    if isinstance(batch.tokens, int):
        return values.mean() if values.numel() and batch.tokens else values.new_zeros(())
    present = batch.tokens > 0
    return (values.mean(1) * present).sum() / present.sum().clamp(min=1)


def objective(batch: Batch) -> Float[Tensor, "batch heads"]:
    """J = ½ mean eᵀΛe + ½ mean rᵀΛr − tr(WeᵀWr) per sample and head, over the rows of We and Wr in use."""
    rows = _exact(batch.directions)
    product = rows[0] * rows[1]
    trace = product.sum((-2, -1)) if batch.used is None else batch.used.to(product.dtype) @ product.sum(-1).mT
    return _per_token((batch.energy * _exact(batch.log_lambda).exp()).sum((0, -1)), batch) / 2 - trace


def reconstruction(batch: Batch) -> Float[Tensor, "batch heads"]:
    """‖K − EΛRᵀ‖²/‖K‖² + 0.1·(relative KKT residual)², minimal only at the KSVD of K = Φ_q f(X)ᵀf(X) Φ_kᵀ.

    Nothing of size n × n is formed: with G_q, G_k, S = f(X)ᵀf(X) (p×p each) ‖K‖² = tr(G_q S G_k S).
    """
    weights, grams = _exact(batch.weights), _exact(batch.grams)
    scale = _exact(batch.log_lambda).exp().unsqueeze(-2)  # (heads, 1, s)
    moved = grams @ weights  # G_qW_e|X, G_kW_r|X
    sample = torch.eye(grams.shape[-1]).to(grams) if batch.sample is None else _exact(batch.sample)
    core = sample.mT @ sample
    size = (grams[0] @ core * (grams[1] @ core).mT).sum((-2, -1))
    cross = (moved[0] * scale * (core @ moved[1])).sum((-2, -1))
    inner = weights.mT @ moved  # EᵀE, RᵀR
    rebuilt = (inner[0] * scale * inner[1] * scale.mT).sum((-2, -1))
    lost = (size - 2 * cross + rebuilt) / torch.where(size > 0, size, 1.0)
    return lost + SHARE * kkt(batch)


def kkt(batch: Batch) -> Float[Tensor, "batch heads"]:
    """Relative KKT residual, squared: ‖(∂J/∂We, ∂J/∂Wr)‖²/‖(Wr, We)‖², ∂J/∂We = f(X)G_qW_e|XΛ/N − Wr."""
    weights, grams = _exact(batch.weights), _exact(batch.grams)
    steps = _per_token(grams @ weights * _exact(batch.log_lambda).exp().unsqueeze(-2), batch)
    rows = _exact(batch.directions).unsqueeze(1)  # (2, 1, heads, rows, s)
    if batch.sample is not None:
        steps = _exact(batch.sample) @ steps
        rows = rows if batch.used is None else rows * batch.used[:, None, :, None]
    size = rows.square().sum((0, -2, -1))
    return (steps - rows.flip(0)).square().sum((0, -2, -1)) / torch.where(size > 0, size, 1.0)


@dataclass(frozen=True, kw_only=True)
class PrimalReading(Reading, kind="primal"):
    """Singular values of the kernel, J, KKT residual and subspace overlaps, per sample and head of a batch.

    Overlaps are the shares of the leading singular subspaces of K that the scores e (left) and r (right) span: 1 at the
    KSVD, rank/p for random subspaces. They are None if K has fewer than `rank` non-zero singular values.
    """

    units: ClassVar[Mapping[str, str]] = {
        "spectrum": "singular values of K/N",
        "residual": "relative",
        "left": "share",
        "right": "share",
    }

    rank: int  # s
    heads: list[dict[str, Any]]  # one per sample and head: spectrum, J, residual, overlaps

    def records(self) -> list[dict[str, Any]]:
        """One row per sample and head, without the spectrum."""
        return [{name: value for name, value in head.items() if name != "spectrum"} for head in self.heads]


def spectrum(batch: Batch, least: float) -> list[dict[str, Any]]:
    """The rows of a PrimalReading, one per non-empty sample and head, from p×p matrices in float64.

    Singular values below `least`, relative to the largest, cannot be distinguished from 0.
    """
    assert isinstance(batch.tokens, Tensor)
    rank, rows = batch.directions.shape[-1], list[dict[str, Any]]()
    parts = objective(batch), kkt(batch).sqrt(), *_overlaps(batch, rank)
    for sample, tokens in enumerate(batch.tokens.tolist()):
        if tokens == 0:
            continue
        for head in range(batch.directions.shape[1]):
            j, residual, values, *shares = (part[sample, head].tolist() for part in parts)
            has_subspace = values[rank - 1] > least * values[0]  # else there is no subspace to compare with
            left, right = shares if has_subspace else (None, None)
            row = {"sample": sample, "head": head, "tokens": int(tokens), "objective": j, "residual": residual}
            rows.append({**row, "left": left, "right": right, "spectrum": values})
    return rows


def _overlaps(batch: Batch, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of K/N (batch, heads, p), and how much of its leading subspaces e and r span (batch, heads).

    With G = TᵀT, Φ = QT for some Q with orthonormal columns: K = Q_q(T_q S T_kᵀ)Q_kᵀ, and e = Q_q(T_q W_e|X).
    """
    assert batch.weights is not None
    assert batch.grams is not None
    values, vectors = torch.linalg.eigh(batch.grams)
    factors = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT
    core = factors[1].mT
    if batch.sample is not None:
        core = batch.sample.mT @ (batch.sample @ core)
    left, sizes, right = torch.linalg.svd(factors[0] @ core)
    leading = torch.stack((left[..., :rank], right.mT[..., :rank]))
    spanned, stretch, _ = torch.linalg.svd(factors @ batch.weights, full_matrices=False)
    spanned = spanned * (stretch > 1e-12 * stretch[..., :1]).unsqueeze(-2)  # zero directions span nothing
    shares = (leading.mT @ spanned).square().sum((-2, -1)) / rank
    assert isinstance(batch.tokens, Tensor)
    return sizes / batch.tokens.clamp(min=1)[:, None, None], shares[0], shares[1]


def _per_token(total: Tensor, batch: Batch) -> Tensor:
    """A sum over tokens (..., batch, heads, ·, ·) or (batch, heads), divided by their number."""
    if isinstance(batch.tokens, int):
        return total / max(batch.tokens, 1)
    count = batch.tokens.clamp(min=1)
    return total / (count[:, None] if total.ndim == 2 else count[:, None, None, None])


def _exact(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
