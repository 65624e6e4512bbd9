"""Floats of 8 or 4 bits, and integers of 8, beside their scales: FP8, INT8, NVFP4, MXFP4.

FP8 and INT8: DeepSeek-V3 and Qwen3-FP8 (128×128 blocks, `weight_scale_inv`, which in spite of its name multiplies),
FBGEMM, ModelOpt, and float-quantized, int-quantized, naive-quantized and mxfp8-quantized of compressed-tensors. E2M1:
NVFP4 (groups of 16, FP8 scales and one scale per tensor, by which compressed-tensors divides and ModelOpt multiplies)
and MXFP4 (groups of 32, powers of 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised, scales_of

BLOCK = (128, 128)
FLOAT8 = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
# Values of the 4-bit float E2M1 by code: one sign, two exponent and one mantissa bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Scaled(Quantised):
    """A weight of 8 bits beside its scales: W = (W_q − z)·s, with s per tensor, per row, per group or per block."""

    name = "FP8 or INT8"
    mark = ".weight_scale"
    roles: ClassVar[Mapping[str, str]] = {"values": ".weight", "scales": ".weight_scale", "zeros": ".weight_zero_point"}
    needed = ("values", "scales")

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Scales beside a weight that is not packed."""
        return f"{module}.weight" in shapes and f"{module}.weight_scale_2" not in shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the stored weight."""
        return self.shape_of("values")

    @property
    def precision(self) -> str:
        """Such as "fp8 e4m3 in 128×128 blocks"."""
        kind = self.source.rows(self.parts["values"], 0, 1).dtype
        if kind.is_floating_point and kind.itemsize > 1:
            return ""
        stored = f"fp8 {FLOAT8[kind]}" if kind in FLOAT8 else str(kind).removeprefix("torch.")
        return f"{stored} {_region(self._block(), self.require_matrix('values'))}"

    def values(self) -> Tensor:
        """(W_q − z)·s."""
        shape, weight = self.require_matrix("values"), self.read("values")
        if weight.is_floating_point() and weight.dtype.itemsize > 1:  # its scales are what remains of a calibration
            return weight
        self.require_kind("values", weight, *FLOAT8, torch.int8)
        block, values = self._block(), weight.float()
        if "zeros" in self.parts:
            self.require("zeros", self.shape_of("scales"))
            values -= _spread(self.read("zeros").float(), shape, block)
        return values.mul_(_spread(scales_of(self.read("scales")), shape, block))

    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, from the shape of the scales and the config."""
        shape, scales = self.require_matrix("values"), self.shape_of("scales")
        if scales in ((), (1,), (1, 1)):
            return shape
        if scales in ((shape[0],), (shape[0], 1)):
            return 1, shape[1]
        stated = block_of(self.settings) or BLOCK
        if len(scales) == 2 and scales == _blocks(shape, stated):
            return stated
        if len(scales) == 2 and scales[0] == shape[0] and scales[1] and shape[1] % scales[1] == 0:
            return 1, shape[1] // scales[1]
        raise ValueError(
            f"{self.parts['scales']} has the shape {scales}, expected {_blocks(shape, stated)} for "
            f"{'×'.join(map(str, stated))} blocks of {self.parts['values']}, {shape}"
        )


class Inverse(Scaled):
    """The same under the name that DeepSeek gave the scales."""

    mark = ".weight_scale_inv"
    roles: ClassVar[Mapping[str, str]] = {"values": ".weight", "scales": ".weight_scale_inv"}


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
        size = self.group_size("scales", groups, columns)
        self.require("scales", (rows, groups))
        scales = scales_of(self.read("scales"))
        if "divisor" in self.parts:
            scales = scales / self._one("divisor")
        if "factor" in self.parts:
            scales = scales * self._one("factor")
        return _e2m1(self).mul_(scales.repeat_interleave(size, dim=1))

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
        return _e2m1(self).mul_(scales_of(self.read("scales")).unsqueeze(-1)).flatten(-2)


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block that a config states: `weight_block_size`, or `block_structure` of compressed-tensors."""
    groups = settings.get("config_groups")
    stated = [settings.get("weight_block_size")]
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        stated.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    for size in stated:
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 2**31 for n in size):
            return size[0], size[1]
    return None


def _e2m1(weight: Quantised) -> Tensor:
    """Values of the 4-bit floats in the last dimension of a weight's bytes, the lower half of a byte first."""
    data = weight.read("codes")
    weight.require_kind("codes", data, torch.uint8)
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    return torch.tensor(E2M1)[codes.int()]


def _spread(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Each scale over its block, up to the shape of the weight."""
    rows, columns = (torch.arange(size) // width for size, width in zip(shape, block, strict=True))
    return scales.reshape(_blocks(shape, block))[rows][:, columns]


def _blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a weight has."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def _region(block: tuple[int, int], shape: tuple[int, int]) -> str:
    """What shares a scale, in words."""
    if block == shape:
        return "per tensor"
    if block[0] == 1:
        return "per row" if block[1] == shape[1] else f"in groups of {block[1]}"
    return f"in {block[0]}×{block[1]} blocks"
