"""Files of `torch.save`, in the zip or the older format, without torch's unpickler.

The pickle is interpreted within limits, every tensor is checked against the bytes of its storage, and only then are
tensors created, over the memory-mapped file.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.support.bounded_pickle import Pickle, UnknownName, as_key, latin1, pairs
from keyquery.support.files import regular

MAGIC = 0x1950A86A20F9469CFC6C  # at the start of a file of the older format
OLDER = 1001  # its version
DIMENSIONS = 64
_TYPES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
_DTYPES = {f"torch.{name}": kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_OTHER = ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor")


@dataclass(frozen=True)
class Storage:
    """A byte range of the file, under a key."""

    key: str
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Claim:
    """A tensor, as the pickle describes it."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def load_pickled(path: Path, device: Any = "cpu", mapped: bool = False) -> Any:
    """Load a file of `torch.save`: tensors in plain containers; anything else raises, and sizes are checked first.

    With `mapped`, tensors of a zipped file are not copied out of it. Parameters come as tensors.
    """
    path = regular(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # copy-on-write
        value, starts = _zipped(path, data) if data[:2] == b"PK" else _older(data)
        return _made(value, _Places(data, starts, torch.device(device), mapped), {})
    except UnknownName as error:
        more = f"{path} is refused: it holds more than weights ({error!s:.100})"
        raise ValueError(f"{more}; save the state dict alone: torch.save(model.state_dict(), path)") from None
    except OSError:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not a readable torch file: {reason:.300}") from None


def _zipped(path: Path, data: mmap.mmap) -> tuple[Any, dict[str, int]]:
    """The content of the pickle of a zip file, and the offsets of its storages, which are not compressed."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
    if sum(info.file_size for info in members.values()) > len(data):
        raise ValueError("its members say that they are larger than the file")
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"it holds {len(pickles)} members data.pkl; expected one")
    root = pickles[0].removesuffix("data.pkl")
    order = _member(data, members[root + "byteorder"]) if root + "byteorder" in members else (0, 0)
    if data[slice(*order)] not in (b"", sys.byteorder.encode()):
        raise ValueError("its numbers are in another byte order")
    storages: dict[str, Storage] = {}
    content = data[slice(*_member(data, members[pickles[0]]))]
    value = Pickle(NAMES, len(content), _remembering(storages, 5)).load(io.BytesIO(content))
    starts = {}
    for key, storage in storages.items():
        start, end = _member(data, members[f"{root}data/{key}"])
        if end - start < storage.nbytes:
            raise ValueError(f"the storage {key!r:.40} says that it has {storage.nbytes} bytes, and has {end - start}")
        starts[key] = start
    return value, starts


def _member(data: mmap.mmap, info: zipfile.ZipInfo) -> tuple[int, int]:
    """The byte range of a member."""
    offset = info.header_offset
    if info.compress_type != zipfile.ZIP_STORED or data[offset : offset + 4] != b"PK\x03\x04":
        raise ValueError(f"its member {info.filename!r:.100} is compressed or not there")
    start = offset + 30 + sum(struct.unpack("<HH", data[offset + 26 : offset + 30]))
    if start + info.file_size > len(data):
        raise ValueError(f"its member {info.filename!r:.100} reaches beyond the end of the file")
    return start, start + info.file_size


def _older(data: mmap.mmap) -> tuple[Any, dict[str, int]]:
    """The same for the older format: five pickles, then storages, each after its number of elements."""
    storages: dict[str, Storage] = {}
    pickles = Pickle(NAMES, len(data), _remembering(storages, 6))
    if (pickles.load(data), pickles.load(data)) != (MAGIC, OLDER):
        raise ValueError("it begins neither as a zip nor with the number of torch's older files")
    if not pickles.load(data).get("little_endian", True):
        raise ValueError("its numbers are in another byte order")
    value, keys = pickles.load(data), pickles.load(data)
    if sorted(keys) != sorted(storages):
        raise ValueError("its list of storages is not that of its tensors")
    starts, offset = {}, data.tell()
    for key in keys:
        storage = storages[key]
        (count,) = struct.unpack("<q", data[offset : offset + 8])
        if count * storage.dtype.itemsize != storage.nbytes or offset + 8 + storage.nbytes > len(data):
            raise ValueError(
                f"its tensors say that they have {storage.nbytes} bytes; the file has {len(data) - offset - 8} for them"
            )
        starts[key] = offset + 8
        offset += 8 + storage.nbytes
    return value, starts


def _remembering(storages: dict[str, Storage], length: int) -> Callable[[Any], Storage]:
    """A function from persistent ids to storages, which it records by key."""

    def remember(given: Any) -> Storage:
        if not isinstance(given, tuple) or len(given) != length:
            raise ValueError("it holds a persistent id that is no storage")
        kind, dtype, key, _, count, *views = given
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str) or any(views):
            raise ValueError("it holds a persistent id that is no storage")
        _check_counts("the elements of a storage", (count,))
        storage = Storage(key, dtype, count * dtype.itemsize)
        if storages.setdefault(key, storage) != storage:
            raise ValueError(f"the storage {key!r:.40} has two descriptions")
        return storage

    return remember


def _check_counts(name: str, counts: Any) -> None:
    if not isinstance(counts, tuple) or not all(type(one) is int and 0 <= one < 2**63 for one in counts):
        raise ValueError(f"{name} must be integers from 0")  # what they are may be too large to print


def _claim(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> Claim:
    """A tensor within its storage; a larger one, such as with stride 0, raises."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("it holds a tensor without a storage")
    _check_counts("offset, shape and strides of a tensor", (offset, *size, *stride))
    size, stride = tuple(size), tuple(stride)
    if len(size) != len(stride) or len(size) > DIMENSIONS:
        raise ValueError(f"a tensor of {len(size)} dimensions has {len(stride)} strides; at most {DIMENSIONS} are read")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if all(size) else 0
    if max(last, math.prod(size)) * dtype.itemsize > storage.nbytes:
        raise ValueError(f"a tensor says that it is {size!r:.60}, more than its storage holds")
    return Claim(storage, dtype, offset, size, stride)


def _second(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Claim:
    return _claim(storage, offset, size, stride, getattr(storage, "dtype", None))


def _third(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Claim:
    return _claim(storage, offset, size, stride, dtype)


def _not_read(*_: Any) -> Any:
    raise ValueError("it holds sparse or quantised tensors, which are not read")


def _device(*parts: Any) -> torch.device:
    return torch.device(*parts)


# Allowed names of a pickle: types, and replacements of functions.
NAMES: dict[str, Any] = {
    **{f"torch.{name}Storage": dtype for name, dtype in _TYPES.items()},
    **{f"{package}.UntypedStorage": torch.uint8 for package in ("torch", "torch.storage")},
    **_DTYPES,
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter"), lambda *items: _mapping(*items)),
    **{f"{package}.set": lambda items=(): set(map(as_key, items)) for package in ("__builtin__", "builtins")},
    **{
        f"{package}.complex": lambda real, imaginary: complex(real, imaginary)
        for package in ("__builtin__", "builtins")
    },
    **{f"torch._utils.{name}": _second for name in ("_rebuild_tensor", "_rebuild_tensor_v2")},
    **{f"torch._utils.{name}": _not_read for name in _OTHER},
    "torch._utils._rebuild_tensor_v3": _third,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": _device,
    "_codecs.encode": latin1,
}


def _mapping(items: Any = ()) -> dict[Any, Any]:
    return dict(items) if isinstance(items, dict) else pairs(items)


class _Places:
    """Tensors over the bytes of their storages; shared storages are created once."""

    def __init__(self, data: mmap.mmap, starts: dict[str, int], device: torch.device, mapped: bool) -> None:
        self.data, self.starts, self.device, self.mapped = data, starts, device, mapped
        self.made: dict[str, Tensor] = {}

    def tensor(self, claim: Claim) -> Tensor:
        key = claim.storage.key
        if key not in self.made:
            self.made[key] = self._bytes(claim.storage)
        empty = torch.empty(0, dtype=claim.dtype, device=self.device)
        return empty.set_(self.made[key].untyped_storage(), claim.offset, claim.size, claim.stride)

    def _bytes(self, storage: Storage) -> Tensor:
        if not storage.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        start = self.starts[storage.key]
        there = torch.frombuffer(self.data, dtype=torch.uint8, count=storage.nbytes, offset=start)
        aligned = start % 16 == 0
        return there if self.mapped and aligned and self.device.type == "cpu" else there.to(self.device, copy=True)


def _made(value: Any, places: _Places, known: dict[int, Any]) -> Any:
    """Plain data with its tensors created; sharing is preserved."""
    if id(value) in known:
        return known[id(value)]
    made = value
    if isinstance(value, Claim):
        made = places.tensor(value)
    elif isinstance(value, Storage):
        raise ValueError("it holds a storage that is no tensor")
    elif isinstance(value, dict):
        made = {key: _made(item, places, known) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        made = type(value)(_made(item, places, known) for item in value)
    known[id(value)] = made
    return made
