"""A hub model by name: only the header and the byte ranges of the tensors that are read are downloaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from safetensors.torch import load
from torch import Tensor

from keyquery._version import __version__
from keyquery.checkpoints.configs.defaults import completed
from keyquery.checkpoints.remote.download import Get, Response, fetch
from keyquery.checkpoints.sources import first_line
from keyquery.support.bounded_json import parse_json
from keyquery.support.extras import optional
from keyquery.support.printable import NAME, printable

# Limit of the bytes to open a model: JSON takes up to thirty times as much memory. The index and headers
# of a model of 100,000 tensors have some 25 MB.
LARGEST, LARGEST_CONFIG = 2**26, 2**22
LARGEST_TENSOR = 2**34
AGENT = f"keyquery/{__version__}"
LONGEST = 255  # characters of a file name, as file systems have it
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Of quantised weights and their scales.
BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}


class Hub:
    """The safetensors of a hub model, read over HTTP by byte ranges. Needs the extra `hf`."""

    def __init__(self, name: str) -> None:
        self.label, self.fetched = name, 0  # bytes so far
        self._places: dict[str, tuple[str, bool]] = {}  # where files were found, and whether by the hub alone
        self.config: Mapping[str, Any] = completed(self._object("config.json", self._whole("config.json") or b"{}"))
        self._entries = {
            tensor: (file, start, self._checked(file, tensor, entry))
            for file in self._files()
            for start, header in [self._header(file)]
            for tensor, entry in header.items()
        }
        self.shapes = {tensor: tuple(entry["shape"]) for tensor, (_, _, entry) in self._entries.items()}

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, by one range request."""
        file, data, entry = self._entries[name]
        shape, dtype = list(entry["shape"]), entry["dtype"]
        if dtype not in BYTES:
            raise ValueError(f"{self.label}: {name} is stored as {dtype}, which is not read")
        rows = range(*slice(start, stop).indices(shape[0])) if shape else range(1)
        row = math.prod(shape[1:]) * BYTES[dtype]
        body = self._range(file, data + entry["data_offsets"][0] + rows.start * row, len(rows) * row)
        return _decode(body, dtype, [len(rows), *shape[1:]] if shape else [])

    def _files(self) -> list[str]:
        """The weight files; an index must not name files outside the model."""
        index = self._whole("model.safetensors.index.json")
        if not index:
            return ["model.safetensors"]
        shards = self._object("the index", index).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        if not names or any(PurePosixPath(n).name != n or not n.isprintable() or len(n) > LONGEST for n in names):
            shown = [printable(name, NAME) for name in sorted(names)[:3]]
            raise ValueError(f"{self.label}: its index must name files of the model, got {shown}")
        return sorted(names)

    def _object(self, what: str, text: bytes) -> dict[str, Any]:
        try:
            found = parse_json(text.decode())
        except ValueError as error:
            raise ValueError(f"{self.label}: {what} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.label}: {what} is not a JSON object")
        return found

    def _checked(self, file: str, tensor: str, entry: Any) -> dict[str, Any]:
        """The header entry of a tensor, whose bytes must match its shape."""
        said = entry if isinstance(entry, dict) else {}
        shape, ends = (said[key] if _sizes(said.get(key)) else None for key in ("shape", "data_offsets"))
        if shape is None or ends is None or len(ends) != 2 or not isinstance(said.get("dtype"), str):
            raise ValueError(f"{self.label}: {file} does not say what {printable(tensor, NAME)} is")
        size = BYTES.get(said["dtype"])
        if size is not None and math.prod(shape) * size != ends[1] - ends[0]:
            raise ValueError(
                f"{self.label}: {file} gives {printable(tensor, NAME)} of {shape} {ends[1] - ends[0]} bytes"
            )
        return said

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """The start of a file's data, and the header entry of each tensor."""
        (size,) = struct.unpack("<Q", self._range(file, 0, 8))
        if size > LARGEST - self.fetched:
            raise ValueError(f"{self.label}: {file} claims a header of {size} bytes; refused")
        header = self._object(f"the header of {file}", self._range(file, 8, size))
        header.pop("__metadata__", None)
        return 8 + size, header

    def _range(self, file: str, start: int, length: int) -> bytes:
        if length > LARGEST_TENSOR:
            raise ValueError(f"{self.label}: {file} names {length} bytes to be read at once; refused")
        if length == 0:
            return b""
        answer = self._get(file, 206, length, {"Range": f"bytes={start}-{start + length - 1}"})
        if answer is None:
            raise FileNotFoundError(f"{self.label} has no {file} on the hub: only safetensors are read from there")
        if answer.status != 206:
            raise ValueError(f"{self.label}: the hub does not serve parts of {file}; download it first")
        if len(answer.body) != length:
            raise ValueError(f"{self.label}: {file} ends early: {len(answer.body)} of {length} bytes came")
        return answer.body

    def _whole(self, file: str) -> bytes | None:
        """A small file, or None if the model has none of that name."""
        answer = self._get(file, 200, LARGEST_CONFIG if file == "config.json" else LARGEST - self.fetched)
        return None if answer is None else answer.body

    def _get(self, file: str, status: int, most: int, more: Mapping[str, str] | None = None) -> Response | None:
        """A response of this status or one that says why not; None if the model has no such file."""
        hub = self._library
        url, plain = (
            hub.hf_hub_url(self.label, file),
            {"user-agent": AGENT, "accept-encoding": "identity", **(more or {})},
        )
        place, trusted = self._places.get(file, (url, True))
        try:
            answer = fetch(hub.get_session(), Get(place, url, plain, self._secret() if trusted else {}, status, most))
        except ValueError as error:
            raise ValueError(f"{self.label}: {file}: {first_line(error)}") from None
        except Exception as error:  # of whatever client the library has
            raise ConnectionError(f"{self.label} could not be had from the hub: {first_line(error)}") from None
        self.fetched += len(answer.body)
        if answer.status in (200, 206):
            self._places[file] = answer.url, answer.trusted
            return answer
        if place != url:  # where a redirect leads to is good for a time only
            del self._places[file]
            return self._get(file, status, most, more)
        code = answer.headers.get("x-error-code", "")
        if answer.status == 404 and code == "EntryNotFound":
            return None
        why = f"HTTP status {answer.status} {code}".strip()
        raise ConnectionError(f"{self.label} could not be had from the hub: {file}: {why[:100]}")

    def _secret(self) -> dict[str, str]:
        """The user's token; build_hf_headers of the library makes a request of its own, without limits."""
        hub = self._library
        token = None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()
        return {"authorization": f"Bearer {token}"} if token else {}

    @cached_property
    def _library(self) -> Any:
        return optional("huggingface_hub", "a hub model")


def _sizes(said: Any) -> bool:
    return isinstance(said, list) and all(isinstance(number, int) and 0 <= number < 2**60 for number in said)


def _decode(body: bytes, dtype: str, shape: list[int]) -> Tensor:
    """Bytes as a tensor, by way of a safetensors file in memory."""
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(body)]}}).encode()
    return load(struct.pack("<Q", len(header)) + header + body)["t"]
