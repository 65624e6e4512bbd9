"""Quantised: a weight that several tensors of a file make up.."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from keyquery.checkpoints.sources import Source

E8M0_BIAS = 127


class Quantised(ABC):
    """A weight of a quantised module: its shape, its precision in words, and its values, read on demand."""

    name: ClassVar[str]  # of the format, in messages
    mark: ClassVar[str]  # the ending by which the weight of a module is found
    roles: ClassVar[Mapping[str, str]]  # endings of its tensors, by role
    needed: ClassVar[tuple[str, ...]]  # roles without which there are no values

    def __init__(self, module: str, source: Source, settings: Mapping[str, Any]) -> None:
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

    def words(self, role: str) -> Tensor:
        """A tensor of int32 words."""
        tensor = self.read(role)
        self.require_kind(role, tensor, torch.int32)
        return tensor

    def group_size(self, role: str, count: int, inputs: int) -> int:
        """How many inputs share a scale."""
        if count < 1 or inputs % count:
            raise ValueError(f"{self.parts[role]} is of {count} groups, which are no whole groups of {inputs} inputs")
        return inputs // count


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` unsigned integers of `bits` bits in the last dimension of int32 words, lowest bits first."""
    data = words.contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    stream = np.unpackbits(data, axis=-1, bitorder="little")[..., : count * bits]
    values = np.packbits(stream.reshape(*data.shape[:-1], count, bits), axis=-1, bitorder="little")
    return torch.from_numpy(values[..., 0])


def scales_of(tensor: Tensor) -> Tensor:
    """Scales in float32; those stored as integers, or as E8M0, are exponents of 2."""
    if tensor.dtype == torch.uint8:
        return torch.ldexp(torch.ones(tensor.shape), tensor.int() - E8M0_BIAS)
    return tensor.float()


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
