"""Results by the digest of their settings, and arrays by the digest of their contents; all writes are atomic."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from keyquery.support.files import write_text


def result_name(words: Sequence[object], settings: Mapping[str, Any]) -> str:
    """A readable file name, unique to the settings. Users keep such files: equal settings must keep their name."""
    readable = "-".join(str(word).replace(" ", "-") for word in words)
    return f"{readable}-{digest_of(json.dumps(settings, sort_keys=True), length=10)}.json"


def digest_of(*parts: str | bytes | np.ndarray, length: int = 16) -> str:
    """The first `length` hexadecimal digits of the SHA-256 of texts, bytes and arrays, concatenated."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part if isinstance(part, bytes) else part.tobytes())
    return digest.hexdigest()[:length]


def array_file(name: str, digest: str) -> str:
    """The file name of a data set's arrays."""
    return f"{name}-{digest}.npz"


def npz_bytes(arrays: Mapping[str, Any], compressed: bool = True) -> bytes:
    """Arrays as the contents of an .npz file, without pickles."""
    data = io.BytesIO()
    save = np.savez_compressed if compressed else np.savez
    save(data, allow_pickle=False, **arrays)
    return data.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    """An array as the contents of an .npy file, without pickles."""
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    return data.getvalue()


def read_json(path: Path, default: Any = None) -> Any:
    """The contents of a JSON file, or `default` if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


def checkpoint_path(folder: Path, name: str) -> Path:
    """Where the training with the result file `name` keeps its checkpoint; the folder is created."""
    path = folder / "checkpoints" / f"{name.removesuffix('.json')}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class Store:
    """JSON results of a `kind` in a folder, one file per name."""

    folder: Path
    kind: type | UnionType = dict

    def done(self, name: str) -> bool:
        """Whether a result is complete; a partial row belongs to an interrupted run, which is resumed."""
        if not (self.folder / name).exists():
            return False
        result = self.read(name)
        return not (isinstance(result, dict) and result.get("partial"))

    def read(self, name: str) -> Any:
        """A result; a damaged file is an error, since it may be a user's."""
        path = self.folder / name
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            result = None
        if not isinstance(result, self.kind):
            raise ValueError(f"{path} is an incomplete result: delete it to recompute it")
        return result

    def get(self, name: str, default: Any) -> Any:
        """A result, or `default` if there is none."""
        return self.read(name) if (self.folder / name).exists() else default

    def write(self, name: str, result: Any, allow_nan: bool = False) -> None:
        """Write a result atomically, since a run may be killed at any time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / name, json.dumps(result, allow_nan=allow_nan) + "\n")
