"""What is proven of a model type that no architecture names: proven on first use, and kept in the user's cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from hashlib import sha1
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
OFF = "KEYQUERY_NO_PROOFS"  # environment variable: prove nothing on first use
TIMEOUT = 180.0  # seconds


class Known(NamedTuple):
    """How a model type is read, and as which architecture."""

    status: str
    family: str | None


def proof_of(model_type: Any) -> Known | None:
    """What is proven of a model type; None if transformers does not have the type here.

    `keyquery prove` proves it in a process of its own, which takes seconds to a minute, and keeps it by type, version
    of transformers and version of the reader. The environment variable KEYQUERY_NO_PROOFS turns that off.
    """
    if not isinstance(model_type, str) or os.environ.get(OFF) or not _has(model_type):
        return None
    with TemporaryDirectory() as folder:
        file = _cache() or Path(folder, "proofs.jsonl")
        facts = cached_facts(file).get(model_type)
        if facts is None:
            command = [sys.executable, "-m", "keyquery", "prove", "--quiet", "--cache", str(file), "--", model_type]
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=TIMEOUT, env={**os.environ, OFF: "1"}, check=False)
            facts = cached_facts(file).get(model_type)
    return None if facts is None else Known(facts["status"], facts["family"])


def cached_facts(file: Path) -> dict[str, dict[str, Any]]:
    """Proofs in a file of JSON lines that still hold: of the installed transformers and of this reader."""
    installed, digest, found = version("transformers"), reader_digest(), {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a killed process may have written a part
            facts = json.loads(line)
            if facts.pop("reader", None) == digest and facts["transformers"] == installed:
                found[facts["model_type"]] = facts
    return found


def reader_digest() -> str:
    """A digest of the files that say how checkpoints are read."""
    folder, digest = files("keyquery.checkpoints"), sha1()
    for part in (folder, *(folder.joinpath(name) for name in ("configs", "families", "positions"))):
        for file in sorted(part.iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".toml")):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _has(model_type: str) -> bool:
    """Whether the installed transformers names a type, found without importing it."""
    try:
        version("transformers")
    except PackageNotFoundError:
        return False
    if not TYPE.fullmatch(model_type):
        return False
    spec = find_spec("transformers")
    folder = Path(spec.origin).parent / "models" / "auto" if spec is not None and spec.origin else None
    names = [] if folder is None else [folder / "auto_mappings.py", folder / "configuration_auto.py"]
    return any(f'"{model_type}"' in file.read_text(encoding="utf-8") for file in names if file.is_file())


def _cache() -> Path | None:
    """The file of proofs; None where no file can be written, as in some containers."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keyquery"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / "proofs.jsonl" if os.access(folder, os.W_OK | os.X_OK) else None
