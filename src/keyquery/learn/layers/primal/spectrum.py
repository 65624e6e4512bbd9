"""KSVD of a primal layer: the spectrum of its kernel on a batch, and the distance of its weights from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyquery.learn.layers.primal.objective import Batch, kkt, objective
from keyquery.reading import Reading


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
