"""Running means of queries and keys by position, and covariances: float64, in one pass and bounded memory."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

PER_FOLD = 4  # sequences per fold that a position must have for its mean to be used


class Moments:
    """Running mean and covariance of vectors in batches (..., n, d), per leading dimensions.

    >>> moments = Moments()
    >>> moments.update(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    >>> moments.update(torch.tensor([[4.0, 3.0]]))
    >>> moments.mean, moments.covariance[1, 1]
    (tensor([2., 1.], dtype=torch.float64), tensor(2., dtype=torch.float64))
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._scatter: Tensor | None = None

    def update(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Add a batch of vectors."""
        x = x.double()
        n = x.shape[-2]
        if n == 0:
            return
        mean = x.mean(-2)
        centred = x - mean.unsqueeze(-2)
        scatter = centred.mT @ centred
        if self._mean is None or self._scatter is None:
            self.count, self._mean, self._scatter = n, mean, scatter
            return
        total, shift = self.count + n, mean - self._mean
        outer = shift.unsqueeze(-1) * shift.unsqueeze(-2)
        self._mean = self._mean + shift * (n / total)
        self._scatter = self._scatter + scatter + outer * (self.count * n / total)
        self.count = total

    @property
    def mean(self) -> Float[Tensor, "*batch d"]:
        """The mean of all vectors so far."""
        if self._mean is None:
            raise ValueError("no activations have been added yet")
        return self._mean

    @property
    def covariance(self) -> Float[Tensor, "*batch d d"]:
        """The covariance of all vectors so far, divided by their number."""
        if self._scatter is None:
            raise ValueError("no activations have been added yet")
        return self._scatter / self.count


class PositionMeans:
    """Running means of queries and keys by position; each sequence belongs to one fold.

    Means of different folds are independent, so that products of the two are not biased by noise.
    """

    def __init__(self, folds: int = 2) -> None:
        self.folds = folds
        self.sequences = torch.zeros(folds, dtype=torch.long)
        self._counts: Tensor | None = None  # (folds, positions)
        self._sums: Tensor | None = None  # (folds, positions, 2, heads, r)

    def add(
        self,
        query: Float[Tensor, "batch heads n r"],
        key: Float[Tensor, "batch heads n r"],
        positions: Int[Tensor, "batch n"],
        real: Bool[Tensor, "batch n"],
        fold: Int[Tensor, " batch"],
    ) -> None:
        """Add a batch of sequences; only `real` (non-padding) tokens count."""
        joint = torch.stack((query, key), 1).permute(0, 3, 1, 2, 4).double()  # (batch, n, 2, heads, r)
        if self._sums is None or self._counts is None:
            self._sums, self._counts = (joint.new_zeros(self.folds, 0, *shape) for shape in (joint.shape[2:], ()))
        more = (int(positions[real].max()) + 1 if bool(real.any()) else 0) - self._counts.shape[1]
        if more > 0:
            self._sums, self._counts = pad(self._sums, (*[0] * 6, 0, more)), pad(self._counts, (0, more))
        rows = (fold.to(positions.device)[:, None] * self._counts.shape[1] + positions)[real]
        self._sums.flatten(0, 1).index_add_(0, rows, joint[real])
        self._counts.view(-1).index_add_(0, rows, torch.ones_like(rows, dtype=torch.float64))
        self.sequences += torch.bincount(fold.cpu(), minlength=self.folds)

    @property
    def known(self) -> Bool[Tensor, " positions"]:
        """Positions at which every fold has enough sequences."""
        return (self.counts >= PER_FOLD).all(0)

    def reaches(self, positions: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Which of these positions are known."""
        known = self.known.to(positions.device)
        return (positions < len(known)) & known[positions.clamp(max=len(known) - 1)]

    @property
    def counts(self) -> Float[Tensor, "folds positions"]:
        """Number of sequences per fold that reach each position."""
        return self._of(None)[0]

    def at(
        self, positions: Int[Tensor, "batch n"], fold: int | None = None
    ) -> tuple[Float[Tensor, "batch heads n r"], Float[Tensor, "batch heads n r"]]:
        """Mean query and key at each position, of one fold or (None) of all; clamped to the last position."""
        counts, sums = self._of(fold)
        means = sums.sum(0) / counts.sum(0).clamp(min=1)[:, None, None, None]
        query, key = means[positions.to(means.device).clamp(max=len(means) - 1)].permute(2, 0, 3, 1, 4)
        return query, key

    def everywhere(self) -> tuple[Float[Tensor, "heads r"], Float[Tensor, "heads r"]]:
        """Mean query and key over all positions."""
        counts, sums = self._of(None)
        query, key = sums.sum((0, 1)) / counts.sum().clamp(min=1)
        return query, key

    def _of(self, fold: int | None) -> tuple[Tensor, Tensor]:
        """Counts and sums of one fold, or of all."""
        if self._counts is None or self._sums is None:
            raise ValueError("no activations have been added yet")
        some = slice(None) if fold is None else slice(fold, fold + 1)
        return self._counts[some], self._sums[some]
