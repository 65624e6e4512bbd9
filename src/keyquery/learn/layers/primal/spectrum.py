"""KSVD of a primal layer: the spectrum of its kernel on a batch, the distance of its weights from it, exact weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keyquery.forms import ksvd
from keyquery.learn.layers.primal.dispatch import fused
from keyquery.learn.layers.primal.objective import Batch, kkt, objective
from keyquery.learn.layers.primal.sample import evenly, sampled, take
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


@torch.no_grad()
def with_grams(batch: Batch, heads: int, feature: str, impl: str) -> Batch:
    """A batch with Gram matrices and f(X), computed from autograd's saved tensors if needed."""
    if batch.grams is not None:
        return batch
    try:
        qk, weights, mix, real, sample = _saved(batch, heads)
    except (RuntimeError, AttributeError):
        raise RuntimeError(
            "ksvd needs the queries and keys of the last forward pass, which backward or a compiled forward pass has "
            "freed: call it before backward, or run the layer under torch.no_grad()"
        ) from None
    grams = fused(qk, weights, mix, real, feature, impl, gram=True)[2]
    return batch._replace(grams=grams, sample=None if sample is None else sample.unflatten(-1, (heads, -1)))


def _saved(batch: Batch, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries and keys, projection weights, Cₑ and Cᵣ, real tokens and f(X), as the autograd function kept them."""
    if batch.loss is None:
        qk, weights, mix, real = batch.energy.grad_fn.saved_tensors  # type: ignore[union-attr]
        assert batch.weights is not None
        return qk, weights, mix, real, None if batch.rows is None else sampled(batch.weights)
    x, qk, weights, concat, *_ = batch.loss.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert batch.rows is not None
    mix = concat.unflatten(1, (2, -1)).permute(1, 2, 0)
    sample = take(x, evenly(x.shape[1], batch.rows, None, x.device)[0])
    return qk.unflatten(-1, (2, heads, -1)), weights, mix, None, sample


@torch.no_grad()
def spectrum(
    batches: tuple[Batch, ...],
    directions: Float[Tensor, "2 heads rows s"],
    log_lambda: Float[Tensor, "heads s"],
) -> list[dict[str, Any]]:
    """The rows of a PrimalReading, one per non-empty sample and head, in float64 from p×p matrices."""
    rank, rows = directions.shape[-1], list[dict[str, Any]]()
    for batch in batches:
        exact = _double(batch)
        assert isinstance(exact.tokens, Tensor)
        weights = exact, directions.double(), log_lambda.double()
        parts = objective(*weights), kkt(*weights).sqrt(), *_overlaps(exact, rank)
        numbers = range(len(exact.tokens)) if batch.numbers is None else batch.numbers.tolist()
        for sample, tokens in enumerate(exact.tokens.tolist()):
            if tokens == 0:
                continue
            for head in range(directions.shape[1]):
                j, residual, values, *shares = (part[sample, head].tolist() for part in parts)
                has_subspace = values[rank - 1] > _least(batch) * values[0]  # else there is no subspace to compare with
                left, right = shares if has_subspace else (None, None)
                row = {"sample": numbers[sample], "head": head, "tokens": int(tokens), "objective": j}
                rows.append({**row, "residual": residual, "left": left, "right": right, "spectrum": values})
    return sorted(rows, key=lambda row: (row["sample"], row["head"]))


def _double(batch: Batch) -> Batch:
    assert batch.weights is not None
    assert batch.grams is not None
    sample = None if batch.sample is None else batch.sample.double()
    weights, grams = batch.weights.double(), batch.grams.double()
    tokens = torch.as_tensor(batch.tokens, dtype=torch.float64, device=grams.device).expand(grams.shape[1])
    energy = (grams @ weights * weights).sum(-2)  # Σeᵢₗ² = wₗᵀGwₗ
    return batch._replace(tokens=tokens, energy=energy, weights=weights, grams=grams, sample=sample)


def _least(batch: Batch) -> float:
    """The relative size below which Gram matrices cannot distinguish a singular value from 0."""
    assert batch.grams is not None
    return math.sqrt(torch.finfo(batch.grams.dtype).eps)


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
        sample = batch.sample if batch.used is None else batch.sample * batch.used[:, :, None, None]
        sample = sample.transpose(1, 2)
        core = sample.mT @ (sample @ core)
    left, sizes, right = torch.linalg.svd(factors[0] @ core)
    leading = torch.stack((left[..., :rank], right.mT[..., :rank]))
    spanned, stretch, _ = torch.linalg.svd(factors @ batch.weights, full_matrices=False)
    spanned = spanned * (stretch > 1e-12 * stretch[..., :1]).unsqueeze(-2)  # zero directions span nothing
    shares = (leading.mT @ spanned).square().sum((-2, -1)) / rank
    assert isinstance(batch.tokens, Tensor)
    return sizes / batch.tokens.clamp(min=1)[:, None, None], shares[0], shares[1]


@torch.no_grad()
def solve(
    phi: Float[Tensor, "2 batch heads n p"],
    sample: Float[Tensor, "batch heads rows p"] | None,
    real: Bool[Tensor, "batch n"],
    rank: int,
) -> tuple[Float[Tensor, "2 heads rows s"], Float[Tensor, "heads s"]]:
    """Exact KSVD directions We, Wr of a batch and log Λ: the stationary point of its mean J that has the largest σ.

    All samples share one kernel, with features f(X)φ/√N; for one sample K = EΛRᵀ, up to the rank.
    """
    points = (phi if sample is None else phi @ sample.mT).double()
    samples = real.any(1).sum().clamp(min=1)
    points = points / (real.sum(1).clamp(min=1) * samples).double().sqrt()[:, None, None, None]
    directions, scales = [], []
    for head in range(phi.shape[2]):
        query, key = (side[:, head][real] for side in points)
        solution = ksvd(query, key, rank)
        present = int((solution.values > 1e-12 * solution.values.max()).sum())
        if present < rank:
            raise ValueError(
                f"rank must be at most {present}, the rank of the kernel of head {head} on data, got {rank}"
            )
        directions.append(torch.stack(solution.primal()))
        scales.append(-solution.values.log())
    return torch.stack(directions, 1), torch.stack(scales)
