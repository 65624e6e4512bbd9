"""bitsandbytes: 4 bits by a table (nf4, fp4) with a scale per block, which may be quantised too; 8 bits by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised
from keyquery.checkpoints.sources import Source
from keyquery.support.bounded_json import parse_json

STATE = ".weight.quant_state.bitsandbytes__"


class FourBit(Quantised):
    """A weight of Linear4bit."""

    name = "bitsandbytes' 4 bits"
    mark = ".weight.absmax"
    roles: ClassVar[Mapping[str, str]] = {
        "codes": ".weight",
        "scales": ".weight.absmax",
        "table": ".weight.quant_map",
        "outer_scales": ".weight.nested_absmax",
        "outer_table": ".weight.nested_quant_map",
        "nf4": f"{STATE}nf4",
        "fp4": f"{STATE}fp4",
    }
    needed = ("codes", "scales", "table")

    def __init__(self, module: str, source: Source, settings: Mapping[str, Any]) -> None:
        super().__init__(module, source, settings)
        self._stated: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise if a tensor is missing, also the one that says how it was quantised."""
        super().check()
        if "nf4" not in self.parts and "fp4" not in self.parts:
            raise ValueError(f"{self.module}.weight is a weight in {self.name}, which lacks {self.module}{STATE}nf4")

    @property
    def state(self) -> Mapping[str, Any]:
        """The JSON object that the file keeps beside the weight."""
        if self._stated is None:
            name = self.parts["nf4" if "nf4" in self.parts else "fp4"]
            if math.prod(self.source.shapes[name]) > 2**16:
                raise ValueError(f"{name} has the shape {self.source.shapes[name]}, expected a short JSON object")
            self._stated = _json(self.source.rows(name), name)
        return self._stated

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file states it; two codes per byte."""
        shape = self.state.get("shape")
        name = self.parts["codes"]
        if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in shape):
            raise ValueError(f"{name}: its quantisation state must hold its shape, got {shape!r:.60}")
        size = math.prod(self.shape_of("codes"))
        if -(-math.prod(shape) // 2) != size:
            raise ValueError(f"{name} has {size} bytes, expected {-(-math.prod(shape) // 2)} for {tuple(shape)}")
        return tuple(shape)

    @property
    def precision(self) -> str:
        """Such as "bitsandbytes nf4 in blocks of 64, double quantisation"."""
        kind = "nf4" if "nf4" in self.parts else "fp4"
        nested = ", double quantisation" if "outer_scales" in self.parts else ""
        return f"bitsandbytes {kind} in blocks of {self._size('blocksize')}{nested}"

    def values(self) -> Tensor:
        """Table of the code · scale of the block; the upper half of a byte comes first."""
        count, size = math.prod(self.shape), self._size("blocksize")
        self.require("table", (16,))
        self.require("scales", (-(-count // size),))
        packed = self.read("codes").flatten()
        self.require_kind("codes", packed, torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[:count]
        values = self.read("table").float()[codes.int()]
        return values.mul_(self._scales()[torch.arange(count) // size]).reshape(self.shape)

    def _scales(self) -> Tensor:
        scales = self.read("scales")
        if "outer_scales" not in self.parts:
            self.require_kind("scales", scales, torch.float32)
            return scales
        size = self._size("nested_blocksize")
        if "outer_table" not in self.parts:
            raise ValueError(f"{self.parts['outer_scales']} lacks {self.module}{self.roles['outer_table']}")
        self.require_kind("scales", scales, torch.uint8)
        self.require("outer_table", (256,))
        self.require("outer_scales", (-(-len(scales) // size),))
        outer = self.read("outer_scales").float()[torch.arange(len(scales)) // size]
        return self.read("outer_table").float()[scales.int()] * outer + self._offset()

    def _offset(self) -> float:
        offset = self.state.get("nested_offset", 0.0)
        if not isinstance(offset, float) or not math.isfinite(offset):
            raise ValueError(f"{self.parts['codes']}: its nested_offset must be a number, got {offset!r:.30}")
        return offset

    def _size(self, key: str) -> int:
        size = self.state.get(key)
        if type(size) is not int or not 0 < size < 2**31:
            raise ValueError(f"{self.parts['codes']}: its quantisation state must hold {key}, got {size!r:.30}")
        return size


class EightBit(Quantised):
    """A weight of Linear8bitLt: W = W_q · SCB / 127, with SCB the largest absolute value of each row."""

    name = "bitsandbytes' 8 bits"
    mark = ".SCB"
    roles: ClassVar[Mapping[str, str]] = {"values": ".weight", "scales": ".SCB", "format": ".weight_format"}
    needed = ("values", "scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the stored weight."""
        return self.shape_of("values")

    @property
    def precision(self) -> str:
        """8 bits by row."""
        return "bitsandbytes int8 per row"

    def values(self) -> Tensor:
        """W_q · SCB / 127."""
        rows, _ = self.require_matrix("values")
        self.require("scales", (rows,))
        weight = self.read("values")
        self.require_kind("values", weight, torch.int8)
        if "format" in self.parts and int(self.read("format").flatten()[0]) != 0:
            raise ValueError(f"{self.parts['format']} is not 0: only weights stored by row are read")
        return weight.float().mul_(self.read("scales").float().unsqueeze(1) / 127)


def _json(tensor: Tensor, name: str) -> dict[str, Any]:
    """A JSON object that a file keeps as the bytes of a tensor."""
    try:
        stated = parse_json(bytes(tensor.flatten().tolist()).decode())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must hold a JSON object: {error}") from None
    if not isinstance(stated, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(stated).__name__}")
    return stated
