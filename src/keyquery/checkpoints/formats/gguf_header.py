"""The header of a GGUF file; every length is checked against the file before anything is allocated.

The layout: b"GGUF", version, counts of tensors and of fields; the fields, name, type, value; the tensors, name, sizes
(the first varies fastest), type, offset; padding up to the alignment; the data. All of it little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyquery.support.printable import NAME, printable

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
DIMENSIONS = 4  # limit of ggml
LEAST_TENSOR, LEAST_FIELD = 8 + 4 + 4 + 8, 8 + 4 + 1  # least bytes per entry


@dataclass(frozen=True)
class Entry:
    """A tensor: its shape in torch order, type number, and byte range in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """The fields and tensors of a file."""

    fields: dict[str, Any]
    tensors: dict[str, Entry]


def read_header(path: Path, quantities: Mapping[int, tuple[int, int]], skip: str | None = None) -> Header:
    """Read and check a header; `quantities` are values and bytes of a block, by type.

    Fields whose name begins with `skip` are passed over.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Walk(data, quantities, skip).header()


class _Walk:
    """A forward-only cursor in the bytes."""

    def __init__(self, data: mmap.mmap, quantities: Mapping[int, tuple[int, int]], skip: str | None) -> None:
        self.data, self.quantities, self.skip, self.at, self.end = data, quantities, skip, 0, len(data)

    def header(self) -> Header:
        if self.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("<I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; versions {' and '.join(map(str, VERSIONS))} are read")
        tensors, fields = self.number("<Q"), self.number("<Q")
        self.room(tensors * LEAST_TENSOR + fields * LEAST_FIELD, f"{tensors} tensors and {fields} fields")
        said = dict(field for _ in range(fields) if (field := self.field()) is not None)
        entries = [self.entry() for _ in range(tensors)]
        align = said.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise ValueError(f"its alignment must be a power of two, got {align!r}")
        start = -(-self.at // align) * align
        return Header(said, dict(self.placed(start, *entry) for entry in entries))

    def room(self, size: int, what: str) -> None:
        if size > self.end - self.at:
            raise ValueError(f"it says that it holds {what} from byte {self.at} on, and ends at byte {self.end}")

    def take(self, size: int) -> bytes:
        self.room(size, f"{size} bytes")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> int:
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def field(self) -> tuple[str, Any] | None:
        name = self.text()
        passed = self.skip is not None and name.startswith(self.skip)
        value = self.value(self.number("<I"), passed)
        return None if passed else (name, value)

    def value(self, kind: int, passed: bool) -> Any:
        if kind == STRING:
            return self.take(self.number("<Q")) if passed else self.text()
        if kind == ARRAY:
            return self.array(self.number("<I"), self.number("<Q"), passed)
        return self.scalars(kind, 1)[0]

    def array(self, kind: int, count: int, passed: bool) -> list[Any]:
        if kind != STRING:
            return self.scalars(kind, count)
        self.room(8 * count, f"{count} texts")
        texts = (self.value(STRING, passed) for _ in range(count))
        if not passed:
            return list(texts)
        for _ in texts:
            pass
        return []

    def scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise ValueError(f"a value of type {kind} is not known")
        dtype = np.dtype(SCALARS[kind])
        self.room(dtype.itemsize * count, f"{count} values")
        return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self.text(), self.number("<I")
        if count > DIMENSIONS:
            raise ValueError(f"{printable(name, NAME)} has {count} dimensions; at most {DIMENSIONS} are read")
        sizes = tuple(self.number("<Q") for _ in range(count))
        return name, sizes[::-1], self.number("<I"), self.number("<Q")

    def placed(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> tuple[str, Entry]:
        """The entry of a tensor, whose bytes must lie within the file."""
        shown = printable(name, NAME)
        if kind not in self.quantities:
            raise ValueError(f"{shown} is of type {kind}, which is not known")
        values, size = self.quantities[kind]
        count = math.prod(shape)
        if (shape[-1] if shape else 1) % values:
            raise ValueError(f"{shown} has rows of {shape[-1:]} values, which are no whole blocks of {values}")
        length = count // values * size
        if start + offset + length > self.end:
            raise ValueError(
                f"{shown} should end at byte {start + offset + length}, and the file ends at {self.end}: it is "
                "truncated"
            )
        return name, Entry(shape, kind, start + offset, length)
