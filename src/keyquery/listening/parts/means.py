"""Mean query and mean key at each position, in independent folds of the data."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEAST = 4  # sequences per fold that a position must have for its mean to be used


class PositionMeans:
    """Running means of queries and keys by position, float64; each sequence belongs to one fold.

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
        self._reserve(int(positions[real].max()) + 1 if bool(real.any()) else 0, joint)
        assert self._sums is not None
        assert self._counts is not None
        length = self._sums.shape[1]
        rows = (fold.to(positions.device)[:, None] * length + positions)[real]
        self._sums.flatten(0, 1).index_add_(0, rows, joint[real])
        self._counts.view(-1).index_add_(0, rows, torch.ones_like(rows, dtype=torch.float64))
        self.sequences += torch.bincount(fold.cpu(), minlength=self.folds)

    def _reserve(self, length: int, like: Float[Tensor, "batch n two heads r"]) -> None:
        """Allocate positions up to `length`."""
        had = 0 if self._counts is None else self._counts.shape[1]
        if had >= length and self._counts is not None:
            return
        counts = torch.zeros(self.folds, length, dtype=torch.float64, device=like.device)
        sums = torch.zeros(self.folds, length, *like.shape[2:], dtype=torch.float64, device=like.device)
        if self._counts is not None and self._sums is not None:
            counts[:, :had], sums[:, :had] = self._counts, self._sums
        self._counts, self._sums = counts, sums

    @property
    def known(self) -> Bool[Tensor, " positions"]:
        """Positions at which every fold has enough sequences."""
        counts, _ = self._filled()
        return (counts >= LEAST).all(0)

    def reaches(self, positions: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Which of these positions are known."""
        known = self.known.to(positions.device)
        return (positions < len(known)) & known[positions.clamp(max=len(known) - 1)]

    @property
    def counts(self) -> Float[Tensor, "folds positions"]:
        """Number of sequences per fold that reach each position."""
        return self._filled()[0]

    def at(
        self, positions: Int[Tensor, "batch n"], fold: int | None = None
    ) -> tuple[Float[Tensor, "batch heads n r"], Float[Tensor, "batch heads n r"]]:
        """Mean query and key at each position, of one fold or (None) of all; clamped to the last position."""
        means = self._means(fold)
        at = means[positions.to(means.device).clamp(max=len(means) - 1)]  # (batch, n, 2, heads, r)
        query, key = at.permute(2, 0, 3, 1, 4)
        return query, key

    def everywhere(self, fold: int | None = None) -> tuple[Float[Tensor, "heads r"], Float[Tensor, "heads r"]]:
        """Mean query and key over all positions."""
        counts, sums = self._filled()
        chosen = slice(None) if fold is None else slice(fold, fold + 1)
        query, key = sums[chosen].sum((0, 1)) / counts[chosen].sum().clamp(min=1)
        return query, key

    def _means(self, fold: int | None) -> Float[Tensor, "positions two heads r"]:
        counts, sums = self._filled()
        chosen = slice(None) if fold is None else slice(fold, fold + 1)
        return sums[chosen].sum(0) / counts[chosen].sum(0).clamp(min=1)[:, None, None, None]

    def _filled(self) -> tuple[Tensor, Tensor]:
        if self._counts is None or self._sums is None:
            raise ValueError("no activations have been added yet")
        return self._counts, self._sums
