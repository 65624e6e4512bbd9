"""4-bit floats E2M1: NVFP4 (groups of 16, FP8 scales and one scale per tensor) and MXFP4 (groups of 32, powers of 2).

compressed-tensors' nvfp4-pack-quantized divides by its global scale, ModelOpt multiplies by `weight_scale_2`; gpt-oss
keeps MXFP4 as `…_blocks` and `…_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised, scales_of, unpack_e2m1


class Float4(Quantised):
    """compressed-tensors' packed 4-bit floats."""

    name = "packed 4-bit floats"
    mark = ".weight_packed"
    roles: ClassVar[Mapping[str, str]] = {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "divisor": ".weight_global_scale",
    }
    needed: ClassVar[tuple[str, ...]] = ("codes", "scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """Two values per byte."""
        rows, half = self.require_matrix("codes")
        return rows, 2 * half

    @property
    def precision(self) -> str:
        """ "nvfp4" or "mxfp4", in groups."""
        whole = "divisor" in self.parts or "factor" in self.parts
        size = self.shape[1] // max(self.require_matrix("scales")[1], 1)
        return f"{'nvfp4' if whole else 'mxfp4'} in groups of {size}"

    def values(self) -> Tensor:
        """E2M1 · scale of the group · scale of the tensor."""
        rows, columns = self.shape
        groups = self.require_matrix("scales")[1]
        if groups < 1 or columns % groups:
            raise ValueError(f"{self.parts['scales']} has {groups} columns, which is no whole group of {columns}")
        self.require("scales", (rows, groups))
        codes = self.read("codes")
        self.require_kind("codes", codes, torch.uint8)
        scales = scales_of(self.read("scales"))
        if "divisor" in self.parts:
            scales = scales / self._one("divisor")
        if "factor" in self.parts:
            scales = scales * self._one("factor")
        return unpack_e2m1(codes).mul_(scales.repeat_interleave(columns // groups, dim=1))

    def _one(self, role: str) -> float:
        self.require(role, (), (1,), (1, 1))
        return float(self.read(role).float())


class ModelOptFloat4(Float4):
    """NVIDIA ModelOpt's NVFP4."""

    mark = ".weight_scale_2"
    roles: ClassVar[Mapping[str, str]] = {"codes": ".weight", "scales": ".weight_scale", "factor": ".weight_scale_2"}
    needed = ("codes", "scales", "factor")


class Blocks(Quantised):
    """MXFP4 as gpt-oss keeps it: (…, groups, 16) bytes and (…, groups) exponents."""

    name = "MXFP4"
    mark = "_blocks"
    roles: ClassVar[Mapping[str, str]] = {"codes": "_blocks", "scales": "_scales"}
    needed = ("codes", "scales")

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Blocks have one more dimension than their scales; what is no weight by its name must have scales."""
        codes, scales = shapes[f"{module}_blocks"], shapes.get(f"{module}_scales")
        if scales is None:
            return len(codes) >= 2 and module.endswith(("weight", "proj"))
        return codes[:-1] == scales

    @property
    def weight_name(self) -> str:
        """The name without the ending."""
        return self.module

    @property
    def shape(self) -> tuple[int, ...]:
        """Two values per byte, groups side by side."""
        *outer, groups, half = self.shape_of("codes")
        return (*outer, groups * half * 2)

    @property
    def precision(self) -> str:
        """ "mxfp4 in groups of 32"."""
        return f"mxfp4 in groups of {2 * self.shape_of('codes')[-1]}"

    def values(self) -> Tensor:
        """E2M1 · 2^(scale − 127)."""
        self.require("scales", self.shape_of("codes")[:-1])
        codes = self.read("codes")
        self.require_kind("codes", codes, torch.uint8)
        return unpack_e2m1(codes).mul_(scales_of(self.read("scales")).unsqueeze(-1)).flatten(-2)
