"""Packed sequences of different lengths, and their padded batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Group:
    """Some sequences of a packed row, padded to the longest of them."""

    def __init__(self, starts: Int[Tensor, " sequences"], lengths: Int[Tensor, " sequences"]) -> None:
        slots = torch.arange(int(lengths.max()), device=starts.device)
        self.real: Bool[Tensor, "sequences longest"] = slots < lengths[:, None]
        self._index = starts[:, None] + slots.minimum(lengths[:, None] - 1)
        self.tokens: Int[Tensor, " tokens"] = self._index[self.real]

    def unpack(self, x: Shaped[Tensor, "1 heads total r"]) -> Shaped[Tensor, "sequences heads longest r"]:
        """Their tokens as a padded batch."""
        return x[0][:, self._index].transpose(0, 1)

    def pack(self, x: Shaped[Tensor, "sequences heads longest r"]) -> Shaped[Tensor, "heads tokens r"]:
        """A padded batch as a row of the group's tokens."""
        return x.transpose(0, 1)[:, self.real]


class Packing:
    """Sequence s holds tokens offsets[s] to offsets[s + 1] − 1 of a row."""

    def __init__(self, offsets: Int[Tensor, " ends"], total: int) -> None:
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"offsets must be int32 or int64, got {offsets.dtype}")
        lengths = offsets.diff()
        ends = offsets.ndim == 1 and len(offsets) > 1 and int(offsets[0]) == 0 and int(offsets[-1]) == total
        if not ends or bool((lengths < 0).any()):
            raise ValueError(f"offsets must rise from 0 to the {total} tokens of x, got {offsets.tolist()}")
        self._starts, self._lengths = offsets[:-1].long(), lengths.long()
        slots = torch.arange(total, device=offsets.device)
        self.positions: Int[Tensor, " total"] = slots - self._starts.repeat_interleave(self._lengths)

    def groups(self) -> Iterator[Group]:
        """Sequences by length, within a factor of two: padding never more than doubles their tokens."""
        size = self._lengths.double().log2().floor()  # −∞ for those that are empty
        for value in size[self._lengths > 0].unique().tolist():
            chosen = size == value
            yield Group(self._starts[chosen], self._lengths[chosen])
