"""GGUF files: quantised weights, dequantised one tensor at a time, under the names of this project's families.

The layout: b"GGUF", version, counts of tensors and of fields; the fields, name, type, value; the tensors, name, sizes
(the first varies fastest), type, offset; padding up to the alignment; the data. All of it little-endian. Every length
is checked against the file before anything is allocated.
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
import torch
from torch import Tensor

from keyquery.checkpoints.formats.gguf_config import config_of, plain_name, plain_names
from keyquery.support.extras import optional
from keyquery.support.printable import NAME, printable

# Factors by which rotary frequencies are divided, in the order of preference: they are tensors, not metadata.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")

# MLA files keep the keys' up-projection by itself, and transposed.
SPLIT, WHOLE = ".self_attn.k_b_proj.weight", ".self_attn.kv_b_proj.weight"

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


class Gguf:
    """The tensors of a GGUF file. Needs the extra `gguf`."""

    def __init__(self, path: Path) -> None:
        self._library, self._path = _library(), path
        fields, tensors = _header(path)
        table = plain_names(self._library)
        self._tensors = {plain_name(name, table): entry for name, entry in tensors.items()}
        self.label = str(path)
        self.shapes = {name: entry.shape for name, entry in self._tensors.items()}
        try:
            self.config = config_of(fields, self.shapes, self._library)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        except (TypeError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"{path}: its metadata cannot be used: {error}") from None
        self._split = {name.replace(SPLIT, WHOLE): name for name in self.shapes if name.endswith(SPLIT)}
        for name, part in self._split.items():  # (heads, latent, width), where other files have (heads·width, latent)
            heads, latent, width = (*self.shapes[part], 0, 0, 0)[:3]
            self.shapes[name] = (heads * width, latent)
        for name in FACTORS:
            if name in self.shapes:  # what a config.json calls LongRoPE
                factor = fields.get(f"{fields.get('general.architecture')}.rope.scaling.attn_factor", 1.0)
                factors = self.rows(name).flatten().tolist()
                self.config["rope_scaling"] = {
                    "rope_type": "longrope",
                    "short_factor": factors,
                    "attention_factor": factor,
                }
                break

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, dequantised; a row is a whole number of quantised blocks."""
        if name in self._split:
            return self.rows(self._split[name]).mT.flatten(0, 1)[start:stop]
        entry, shape = self._tensors[name], self.shapes[name]
        count = shape[0] if len(shape) > 1 else 1  # a vector is one row of blocks, and read whole
        first, last, _ = slice(start, stop).indices(count) if len(shape) > 1 else (0, 1, 1)
        row = entry.size // max(count, 1)
        data = np.fromfile(self._path, np.uint8, max(last - first, 0) * row, offset=entry.start + first * row)
        if len(data) != max(last - first, 0) * row:
            raise ValueError(f"{self.label} ends early: it was changed while it was read")
        if len(data) == 0:
            return torch.empty(0, *shape[1:])
        try:  # in rows, of which the package takes a few at a time
            values = self._library.quants.dequantize(data.reshape(max(last - first, 1), -1), self._kind(entry.kind))
        except NotImplementedError:
            raise ValueError(f"{self.label}: {name} is stored as {self.stored(name)}, which is not read") from None
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))
        return tensor.reshape(shape)[start:stop] if len(shape) == 1 else tensor.reshape(-1, *shape[1:])

    def stored(self, name: str) -> str:
        """How the file holds a tensor: F32, Q4_1 and the like."""
        return str(self._kind(self._tensors[self._split.get(name, name)].kind).name)

    def _kind(self, number: int) -> Any:
        return self._library.GGMLQuantizationType(number)


def words(path: Path) -> list[str] | None:
    """The texts of a GGUF file's tokens by id, where it has them."""
    field = _header(path)[0].get("tokenizer.ggml.tokens")
    return [str(word) for word in field] if isinstance(field, list) else None


def _library() -> Any:
    return optional("gguf", "a .gguf file")


def _header(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The fields and the tensors of a file."""
    sizes = {int(kind): size for kind, size in _library().GGML_QUANT_SIZES.items()}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data, sizes).header()
    except ValueError as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None


class _Walk:
    """A forward-only cursor in the bytes."""

    def __init__(self, data: mmap.mmap, blocks: Mapping[int, tuple[int, int]]) -> None:
        """`blocks`: values and bytes of a block, by type."""
        self.data, self.blocks, self.at, self.end = data, blocks, 0, len(data)

    def header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("<I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; versions {' and '.join(map(str, VERSIONS))} are read")
        tensors, fields = self.number("<Q"), self.number("<Q")
        self.room(tensors * LEAST_TENSOR + fields * LEAST_FIELD, f"{tensors} tensors and {fields} fields")
        said = {self.text(): self.value(self.number("<I")) for _ in range(fields)}
        entries = [self.entry() for _ in range(tensors)]
        align = said.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise ValueError(f"its alignment must be a power of two, got {align!r}")
        start = -(-self.at // align) * align
        return said, dict(self.placed(start, *entry) for entry in entries)

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

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalars(kind, 1)[0]
        kind, count = self.number("<I"), self.number("<Q")
        if kind != STRING:
            return self.scalars(kind, count)
        return [self.text() for _ in range(count)]

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
        if kind not in self.blocks:
            raise ValueError(f"{shown} is of type {kind}, which is not known")
        values, size = self.blocks[kind]
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
