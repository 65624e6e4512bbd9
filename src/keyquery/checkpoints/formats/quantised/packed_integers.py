"""compressed-tensors' pack-quantized: integers of 1 to 8 bits in int32 words, with scales per row or group.

Codes lie 2^(bits − 1) above the integers they stand for; zero points are packed along the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised, scales_of, unpack


class PackedIntegers(Quantised):
    """A weight of packed integers."""

    name = "compressed-tensors' packed integers"
    mark = ".weight_packed"
    roles: ClassVar[Mapping[str, str]] = {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "shape": ".weight_shape",
        "zeros": ".weight_zero_point",
        "groups": ".weight_g_idx",
    }
    needed = ("codes", "scales", "shape")

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Only packed integers state the shape of the weight; packed floats need none."""
        return f"{module}.weight_shape" in shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """What the file states, checked against the codes."""
        self.require("shape", (2,))
        rows, columns = (int(size) for size in self.read("shape").tolist())
        packed = self.require_matrix("codes")
        if packed[0] != rows or not 0 < columns <= 32 * packed[1]:
            raise ValueError(
                f"{self.parts['shape']} states {(rows, columns)}, which does not fit {self.parts['codes']}, {packed}"
            )
        return rows, columns

    @property
    def bits(self) -> int:
        """Bits of a code: so many as fill the words."""
        words, columns = self.require_matrix("codes")[1], self.shape[1]
        fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words]
        if 4 in fitting or 8 in fitting:
            return 4 if 4 in fitting else 8
        if len(fitting) != 1:
            raise ValueError(f"{self.parts['codes']} has {words} words for {columns} columns, which is no whole code")
        return fitting[0]

    @property
    def precision(self) -> str:
        """Such as "int4 in groups of 128"."""
        groups, columns = self.require_matrix("scales")[1], self.shape[1]
        return f"int{self.bits} " + ("per row" if groups == 1 else f"in groups of {columns // groups}")

    def values(self) -> Tensor:
        """(code − 2^(bits − 1) − z)·s; each column has its group."""
        (rows, columns), bits = self.shape, self.bits
        scales = scales_of(self.read("scales"))
        groups = self.require_matrix("scales")[1]
        if groups < 1 or columns % groups:
            raise ValueError(f"{self.parts['scales']} has {groups} columns, which is no whole group of {columns}")
        self.require("scales", (rows, groups))
        codes = self.read("codes")
        self.require_kind("codes", codes, torch.int32)
        values = unpack(codes, bits, columns).float() - 2 ** (bits - 1)
        group = self._group_of_columns(columns, groups)
        if "zeros" in self.parts:
            values -= self._zeros(rows, groups, bits)[:, group]
        return values.mul_(scales[:, group])

    def _zeros(self, rows: int, groups: int, bits: int) -> Tensor:
        zeros = self.read("zeros")
        if zeros.dtype == torch.int32:
            self.require("zeros", (-(-rows * bits // 32), groups))
            return unpack(zeros.mT.contiguous(), bits, rows).mT.float() - 2 ** (bits - 1)
        self.require("zeros", (rows, groups))
        return zeros.float()

    def _group_of_columns(self, columns: int, groups: int) -> Tensor:
        if "groups" in self.parts:
            self.require("groups", (columns,))
            order = self.read("groups").long()
            if bool((order >= 0).all()):  # −1 where columns are in order
                if int(order.max()) >= groups:
                    raise ValueError(f"{self.parts['groups']} names group {int(order.max())}; there are {groups}")
                return order
        return torch.arange(columns) // (columns // groups)
