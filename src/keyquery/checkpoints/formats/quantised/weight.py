"""Quantised: a weight that several tensors of a file make up. The formats are its subclasses, one file each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from keyquery.support.bounded_json import parse_json

E8M0_BIAS = 127
# Values of the 4-bit float E2M1 by code: one sign, two exponent and one mantissa bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FLOAT8 = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}


@runtime_checkable
class Tensors(Protocol):
    """What a format needs of a source: shapes by name, and rows."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor."""


class Quantised(ABC):
    """A weight of a quantised module: its shape, its precision in words, and its values, read on demand."""

    name: ClassVar[str]  # of the format, in messages
    mark: ClassVar[str]  # the ending by which the weight of a module is found
    roles: ClassVar[Mapping[str, str]]  # endings of its tensors, by role
    needed: ClassVar[tuple[str, ...]]  # roles without which there are no values

    def __init__(self, module: str, source: Tensors, settings: Mapping[str, Any]) -> None:
        """`settings`: the config's quantization_config, or nothing."""
        self.module, self.source, self.settings = module, source, settings
        self.parts = {role: module + end for role, end in self.roles.items() if module + end in source.shapes}

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the tensors of a module that has the mark are of this format."""
        return True

    @property
    def weight_name(self) -> str:
        """The name under which an unquantised file would hold the weight."""
        return f"{self.module}.weight"

    def check(self) -> None:
        """Raise if a tensor is missing."""
        missing = [self.module + self.roles[role] for role in self.needed if role not in self.parts]
        if missing:
            raise ValueError(f"{self.module}{self.mark} is a weight in {self.name}, which lacks {missing[0]}")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, (out, in)."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """What the values were made of, in a few words."""

    @abstractmethod
    def values(self) -> Tensor:
        """The weight in float32, (out, in)."""

    def read(self, role: str) -> Tensor:
        """One of its tensors."""
        return self.source.rows(self.parts[role])

    def shape_of(self, role: str) -> tuple[int, ...]:
        """The shape of one of its tensors."""
        return tuple(self.source.shapes[self.parts[role]])

    def require(self, role: str, *shapes: tuple[int, ...]) -> None:
        """Raise unless a tensor has one of these shapes."""
        if self.shape_of(role) not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ValueError(f"{self.parts[role]} has the shape {self.shape_of(role)}, expected {expected}")

    def require_matrix(self, role: str) -> tuple[int, int]:
        """The two sizes of a tensor; raises if it has other dimensions."""
        shape = self.shape_of(role)
        if len(shape) != 2:
            raise ValueError(f"{self.parts[role]} has the shape {shape}, expected 2 dimensions")
        return shape[0], shape[1]

    def require_kind(self, role: str, tensor: Tensor, *kinds: torch.dtype) -> None:
        """Raise unless a tensor has one of these types."""
        if tensor.dtype not in kinds:
            wanted = " or ".join(_kind(kind) for kind in kinds)
            raise ValueError(f"{self.parts[role]} is stored as {_kind(tensor.dtype)}, expected {wanted}")


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` unsigned integers of `bits` bits in the last dimension of int32 words, lowest bits first."""
    data = words.contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    stream = np.unpackbits(data, axis=-1, bitorder="little")[..., : count * bits]
    values = np.packbits(stream.reshape(*data.shape[:-1], count, bits), axis=-1, bitorder="little")
    return torch.from_numpy(values[..., 0])


def unpack_e2m1(data: Tensor) -> Tensor:
    """Values of the 4-bit floats in the last dimension of bytes, the lower half of a byte first."""
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    return torch.tensor(E2M1)[codes.int()]


def scales_of(tensor: Tensor) -> Tensor:
    """Scales in float32; those stored as integers, or as E8M0, are exponents of 2."""
    if tensor.dtype == torch.uint8:
        return torch.ldexp(torch.ones(tensor.shape), tensor.int() - E8M0_BIAS)
    return tensor.float()


def spread(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Each scale over its block, up to the shape of the weight."""
    rows, columns = (torch.arange(size) // width for size, width in zip(shape, block, strict=True))
    return scales[rows][:, columns]


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a weight has."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def stated_object(tensor: Tensor, name: str) -> dict[str, Any]:
    """A JSON object that a file keeps as the bytes of a tensor."""
    try:
        stated = parse_json(bytes(tensor.flatten().tolist()).decode())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must hold a JSON object: {error}") from None
    if not isinstance(stated, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(stated).__name__}")
    return stated


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
