"""Hub models by name: from the local cache, else the header and the byte ranges of the tensors that are read."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.torch import load
from torch import Tensor

from keyquery._version import __version__
from keyquery.checkpoints.configs.defaults import completed
from keyquery.support.bounded_json import parse_json
from keyquery.support.extras import optional
from keyquery.support.printable import NAME, first_line, printable

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Current names of models that are known by a bare name, without an owner.
OWNERS = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt"),
    "google-bert": ("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased"),
    "distilbert": ("distilbert-base-uncased", "distilbert-base-cased", "distilgpt2", "distilroberta-base"),
    "FacebookAI": ("roberta-base", "roberta-large", "xlm-roberta-base", "xlm-roberta-large"),
    "google-t5": ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
    "albert": ("albert-base-v1", "albert-base-v2", "albert-large-v2", "albert-xlarge-v2", "albert-xxlarge-v2"),
}
# Limit of the bytes to open a model: JSON takes up to thirty times as much memory. The index and headers
# of a model of 100,000 tensors have some 25 MB.
LARGEST, LARGEST_CONFIG = 2**26, 2**22
LARGEST_TENSOR = 2**34
PATIENCE = 60.0  # seconds per response, plus the time of its bytes
SLOWEST = 2**18  # least bytes per second
STALL = 30.0  # seconds without a byte
LONGEST = 255  # characters of a file name, as file systems have it
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Of quantised weights and their scales.
BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}


def cache_folder() -> Path:
    """The cache folder of huggingface_hub: HF_HUB_CACHE, or `hub` in HF_HOME, or in the user's cache."""
    if stated := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(stated).expanduser()
    around = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(around, "huggingface")).expanduser() / "hub"


def cached(name: str) -> Path | None:
    """The folder of a hub model (org/name) in the local cache, if its weights are there, else None.

    That of the branch main, if it has weights, else the newest that has.
    """
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    first = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    try:
        snapshots = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    snapshots.sort(key=lambda path: (path.name == first, path.stat().st_mtime), reverse=True)
    return next((path for path in snapshots if _has_weights(path)), None)


def located(source: str | Path) -> Path:
    """The path itself, or the folder of a hub model (org/name) in the local cache."""
    named = isinstance(source, str) and HUB_NAME.fullmatch(source) and not Path(source).exists()
    return (cached(str(source)) if named else None) or Path(source)


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights; missing shards are reported when the model is read."""
    return any(path.suffix in (".safetensors", ".bin", ".pt", ".gguf") and path.exists() for path in folder.iterdir())


def full_names(name: str) -> list[str]:
    """Names on the hub that a bare name may mean: a known one, and those in the local cache."""
    known = [f"{owner}/{name}" for owner, names in OWNERS.items() if name in names]
    folders = cache_folder().glob("models--*--*")
    here = sorted("/".join(folder.name.split("--", 2)[1:]) for folder in folders)
    return list(dict.fromkeys([*known, *(full for full in here if full.partition("/")[2].lower() == name.lower())]))


class Hub:
    """The safetensors of a hub model, read over HTTP by byte ranges. Needs the extra `hf`."""

    def __init__(self, name: str) -> None:
        self.label, self.fetched = name, 0  # bytes so far
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
            parsed = parse_json(text.decode())
        except ValueError as error:
            raise ValueError(f"{self.label}: {what} is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ValueError(f"{self.label}: {what} is not a JSON object")
        return parsed

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
        body = self._get(file, 206, length, {"range": f"bytes={start}-{start + length - 1}"})
        if body is None:
            raise FileNotFoundError(f"{self.label} has no {file} on the hub: only safetensors are read from there")
        if len(body) != length:
            raise ValueError(f"{self.label}: {file} ends early: {len(body)} of {length} bytes came")
        return body

    def _whole(self, file: str) -> bytes | None:
        """A small file, or None if the model has none of that name."""
        return self._get(file, 200, LARGEST_CONFIG if file == "config.json" else LARGEST - self.fetched, {})

    def _get(self, file: str, status: int, limit: int, more: Mapping[str, str]) -> bytes | None:
        """The body of a response of this status; None if the model has no such file.

        The hub's library follows redirects, and drops the token where one leads to another host.
        """
        hub = self._library
        headers = {"user-agent": f"keyquery/{__version__}", "accept-encoding": "identity", **self._secret(), **more}
        request = {"url": hub.hf_hub_url(self.label, file), "headers": headers}
        try:
            with hub.get_session().stream("GET", **request, follow_redirects=True, timeout=STALL) as answer:
                body = _limited(answer, limit) if answer.status_code == status else b""
        except ValueError as error:
            raise ValueError(f"{self.label}: {file}: {first_line(error)}") from None
        except Exception as error:  # of whatever client the library has
            raise ConnectionError(f"{self.label} could not be had from the hub: {first_line(error)}") from None
        self.fetched += len(body)
        if answer.status_code == status:
            return body
        if answer.status_code == 200:
            raise ValueError(f"{self.label}: the hub does not serve parts of {file}; download it first")
        code = answer.headers.get("x-error-code", "")
        if answer.status_code == 404 and code == "EntryNotFound":
            return None
        why = f"HTTP status {answer.status_code} {code}".strip()
        raise ConnectionError(f"{self.label} could not be had from the hub: {file}: {why[:100]}")

    def _secret(self) -> dict[str, str]:
        """The user's token; build_hf_headers of the library makes a request of its own, without limits."""
        hub = self._library
        token = None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()
        return {"authorization": f"Bearer {token}"} if token else {}

    @cached_property
    def _library(self) -> Any:
        return optional("huggingface_hub", "a hub model")


def _limited(answer: Any, limit: int) -> bytes:
    """The body of a response, at most so many bytes, within a time that depends on them."""
    seconds = PATIENCE + limit / SLOWEST
    body, until = bytearray(), time.monotonic() + seconds
    for chunk in answer.iter_raw():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"more than {limit} bytes came, which is refused")
        if time.monotonic() > until:
            raise TimeoutError(f"no whole response within {seconds:.0f} seconds")
    return bytes(body)


def _sizes(said: Any) -> bool:
    return isinstance(said, list) and all(isinstance(number, int) and 0 <= number < 2**60 for number in said)


def _decode(body: bytes, dtype: str, shape: list[int]) -> Tensor:
    """Bytes as a tensor, by way of a safetensors file in memory."""
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(body)]}}).encode()
    return load(struct.pack("<Q", len(header)) + header + body)["t"]
