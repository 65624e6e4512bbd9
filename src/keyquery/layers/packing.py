"""Sequences of different lengths in one row of tokens, and as a padded batch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Packing:
    """Sequence s holds tokens offsets[s] to offsets[s + 1] − 1 of a row.

    >>> packing = Packing(torch.tensor([0, 2, 5]), total=5)
    >>> packing.positions.tolist(), packing.real.tolist()
    ([0, 1, 0, 1, 2], [[True, True, False], [True, True, True]])
    """

    def __init__(self, offsets: Int[Tensor, " ends"], total: int) -> None:
        lengths = offsets.diff()
        ends = offsets.ndim == 1 and len(offsets) > 1 and int(offsets[0]) == 0 and int(offsets[-1]) == total
        if not ends or bool((lengths < 0).any()):
            raise ValueError(f"offsets must rise from 0 to the {total} tokens of x, got {offsets.tolist()}")
        place = torch.arange(int(lengths.max()), device=offsets.device)
        self.real: Bool[Tensor, "sequences longest"] = place < lengths[:, None]
        self._index = (offsets[:-1, None] + place).clamp(max=max(total - 1, 0))
        self.positions: Int[Tensor, " total"] = place.expand_as(self.real)[self.real]

    def unpack(self, x: Shaped[Tensor, "1 heads total r"]) -> Shaped[Tensor, "sequences heads longest r"]:
        """A row of tokens as a padded batch."""
        return x[0][:, self._index].transpose(0, 1)

    def pack(self, x: Shaped[Tensor, "sequences heads longest r"]) -> Shaped[Tensor, "1 heads total r"]:
        """A padded batch as a row of tokens."""
        return x.transpose(0, 1)[:, self.real].unsqueeze(0)
