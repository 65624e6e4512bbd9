"""AWQ in its gemm layout: 4-bit codes packed along the outputs, eight to a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised, unpack

BITS = 4
# Where output j of eight lies in a word.
POSITION = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq(Quantised):
    """A weight of AWQ."""

    name = "AWQ"
    mark = ".qweight"
    roles: ClassVar[Mapping[str, str]] = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros"}
    needed = ("codes", "scales", "zeros")

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        inputs, words = self.require_matrix("codes")
        return words * 32 // BITS, inputs

    @property
    def precision(self) -> str:
        """Such as "awq int4 in groups of 128"."""
        return f"awq int{BITS} in groups of {self.shape[1] // max(self.require_matrix('scales')[0], 1)}"

    def values(self) -> Tensor:
        """(q − z)·s."""
        version, bits = self.settings.get("version", "gemm"), self.settings.get("bits", BITS)
        if str(version).lower() != "gemm" or bits != BITS:
            raise ValueError(
                f"{self.parts['codes']}: AWQ {version!r:.20} of {bits!r:.20} bits, expected gemm of 4 bits"
            )
        outputs, inputs = self.shape
        count = self.require_matrix("scales")[0]
        self.require("scales", (count, outputs))
        self.require("zeros", (count, outputs * BITS // 32))
        if count < 1 or inputs % count:
            raise ValueError(f"{self.parts['scales']} has {count} rows, which is no whole group of {inputs} inputs")
        codes, zeros = (self._outputs(role, outputs) for role in ("codes", "zeros"))
        size = inputs // count
        values = codes.float() - zeros.float().repeat_interleave(size, dim=0)
        return values.mul_(self.read("scales").float().repeat_interleave(size, dim=0)).mT.contiguous()

    def _outputs(self, role: str, outputs: int) -> Tensor:
        words = self.read(role)
        self.require_kind(role, words, torch.int32)
        return unpack(words, BITS, outputs).unflatten(1, (-1, 8))[..., POSITION].flatten(1)
