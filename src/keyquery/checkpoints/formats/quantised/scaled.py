"""FP8 and INT8 weights with their scales: W = (W_q − z)·s, with s per tensor, per row, per group or per block.

DeepSeek-V3 and Qwen3-FP8 (128×128 blocks, `weight_scale_inv`, which in spite of its name multiplies), FBGEMM, ModelOpt,
and the formats float-quantized, int-quantized, naive-quantized and mxfp8-quantized of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import FLOAT8, Quantised, blocks, scales_of, spread

BLOCK = (128, 128)


class Scaled(Quantised):
    """A weight of 8 bits beside its scales."""

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
        rows, columns = self._block()
        whole = self.require_matrix("values")
        return f"{stored} {_region((rows, columns), whole)}"

    def values(self) -> Tensor:
        """(W_q − z)·s."""
        shape, weight = self.require_matrix("values"), self.read("values")
        if weight.is_floating_point() and weight.dtype.itemsize > 1:  # its scales are what remains of a calibration
            return weight
        self.require_kind("values", weight, *FLOAT8, torch.int8)
        block, values = self._block(), weight.float()
        if "zeros" in self.parts:
            self.require("zeros", self.shape_of("scales"))
            values -= spread(self.read("zeros").float().reshape(blocks(shape, block)), shape, block)
        return values.mul_(spread(scales_of(self.read("scales")).reshape(blocks(shape, block)), shape, block))

    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, from the shape of the scales and the config."""
        shape, scales = self.require_matrix("values"), self.shape_of("scales")
        if scales in ((), (1,), (1, 1)):
            return shape
        if scales in ((shape[0],), (shape[0], 1)):
            return 1, shape[1]
        stated = block_of(self.settings)
        if len(scales) == 2 and scales == blocks(shape, stated or BLOCK):
            return stated or BLOCK
        if len(scales) == 2 and scales[0] == shape[0] and scales[1] and shape[1] % scales[1] == 0:
            return 1, shape[1] // scales[1]
        expected = blocks(shape, stated or BLOCK)
        size = "×".join(map(str, stated or BLOCK))
        raise ValueError(
            f"{self.parts['scales']} has the shape {scales}, expected {expected} for {size} blocks of "
            f"{self.parts['values']}, {shape}"
        )


class Inverse(Scaled):
    """The same under the name that DeepSeek gave the scales."""

    mark = ".weight_scale_inv"
    roles: ClassVar[Mapping[str, str]] = {"values": ".weight", "scales": ".weight_scale_inv"}


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


def _region(block: tuple[int, int], shape: tuple[int, int]) -> str:
    """What shares a scale, in words."""
    if block == shape:
        return "per tensor"
    if block[0] == 1:
        return "per row" if block[1] == shape[1] else f"in groups of {block[1]}"
    return f"in {block[0]}×{block[1]} blocks"
