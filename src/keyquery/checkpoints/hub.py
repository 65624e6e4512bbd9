"""A hub model by its name: the header and the byte ranges of what is read, and nothing else."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from safetensors.torch import load
from torch import Tensor

from keyquery.checkpoints.sources import first_line
from keyquery.extras import optional

LARGEST_HEADER = 100_000_000  # as the format itself allows
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Hub:
    """The safetensors of a hub model, read over HTTP by byte ranges. Needs the extra `hf`."""

    def __init__(self, name: str) -> None:
        self.label, self.fetched = name, 0  # bytes so far
        self._places: dict[str, tuple[str, dict[str, str]]] = {}
        self.config: Mapping[str, Any] = self._object("config.json", self._whole("config.json") or b"{}")
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
        """The files that hold the weights; an index can name none that is not the model's own."""
        index = self._whole("model.safetensors.index.json")
        if not index:
            return ["model.safetensors"]
        shards = self._object("the index", index).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        if not names or any(PurePosixPath(name).name != name or not name.isprintable() for name in names):
            raise ValueError(f"{self.label}: its index must name files of the model, got {sorted(names)[:3]}")
        return sorted(names)

    def _object(self, what: str, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.label}: {what} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.label}: {what} is not a JSON object")
        return found

    def _checked(self, file: str, tensor: str, entry: Any) -> dict[str, Any]:
        """What a header says of a tensor, whose bytes must be as many as its shape has."""
        said = entry if isinstance(entry, dict) else {}
        shape, ends = (said[key] if _sizes(said.get(key)) else None for key in ("shape", "data_offsets"))
        if shape is None or ends is None or len(ends) != 2 or not isinstance(said.get("dtype"), str):
            raise ValueError(f"{self.label}: {file} does not say what {tensor} is")
        size = BYTES.get(said["dtype"])
        if size is not None and math.prod(shape) * size != ends[1] - ends[0]:
            raise ValueError(f"{self.label}: {file} gives {tensor} of {shape} {ends[1] - ends[0]} bytes")
        return said

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Where a file's data begin, and what its header says of each tensor."""
        (size,) = struct.unpack("<Q", self._range(file, 0, 8))
        if size > LARGEST_HEADER:
            raise ValueError(f"{self.label}: {file} claims a header of {size} bytes; refused")
        header = self._object(f"the header of {file}", self._range(file, 8, size))
        header.pop("__metadata__", None)
        return 8 + size, header

    def _range(self, file: str, start: int, length: int) -> bytes:
        url, headers = self._locate(file)
        request = Request(url, headers={**headers, "Range": f"bytes={start}-{start + length - 1}"})
        with self._send(request) as answer:
            if answer.status != 206:
                raise ValueError(f"{self.label}: the hub does not serve parts of {file}; download it first")
            body: bytes = answer.read(length + 1)
        self.fetched += len(body)
        if len(body) != length:
            raise ValueError(f"{self.label}: {file} ends early: {len(body)} of {length} bytes came")
        return body

    def _whole(self, file: str) -> bytes | None:
        """A small file, or None if the model has none of that name."""
        missing = optional("huggingface_hub.errors", "a hub model").EntryNotFoundError
        try:
            url, headers = self._locate(file)
        except missing:
            return None
        with self._send(Request(url, headers=headers)) as answer:
            body: bytes = answer.read(LARGEST_HEADER + 1)
        self.fetched += len(body)
        if len(body) > LARGEST_HEADER:
            raise ValueError(f"{self.label}: {file} is larger than {LARGEST_HEADER} bytes; refused")
        return body

    def _locate(self, file: str) -> tuple[str, dict[str, str]]:
        """A file's final address; the user's token goes to the hub itself only, not where it redirects to."""
        if file not in self._places:
            hub = self._library
            url = hub.hf_hub_url(self.label, file)
            try:
                location = hub.get_hf_file_metadata(url).location
            except optional("huggingface_hub.errors", "a hub model").EntryNotFoundError:
                raise
            except Exception as error:
                raise ConnectionError(f"{self.label} could not be had from the hub: {first_line(error)}") from None
            same = urlsplit(location).netloc == urlsplit(url).netloc
            self._places[file] = (location, dict(hub.utils.build_hf_headers()) if same else {})
        return self._places[file]

    def _send(self, request: Request) -> Any:
        try:
            return urlopen(request, timeout=60)
        except URLError as error:
            raise ConnectionError(f"{self.label} could not be had from the hub: {error}") from None

    @cached_property
    def _library(self) -> Any:
        return optional("huggingface_hub", "a hub model")


def _sizes(said: Any) -> bool:
    return isinstance(said, list) and all(isinstance(number, int) and 0 <= number < 2**60 for number in said)


def _decode(body: bytes, dtype: str, shape: list[int]) -> Tensor:
    """Bytes as a tensor, by way of a safetensors file that holds nothing else."""
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(body)]}}).encode()
    return load(struct.pack("<Q", len(header)) + header + body)["t"]
