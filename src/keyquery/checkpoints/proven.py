"""What is proven of a model type that no architecture names: proven on first use, and kept in the user's cache."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# By name, since the package of tests imports this one.
SWEEP = "keyquery.testing.proof.sweep"
TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
OFF = "KEYQUERY_NO_PROOFS"  # environment variable: prove nothing on first use


def proof_of(model_type: Any) -> Any:
    """The proof of a model type; None if transformers does not have the type here.

    It is made in a process of its own, which takes seconds to a minute, and kept by type, version of transformers and
    version of the reader. The environment variable KEYQUERY_NO_PROOFS turns that off.
    """
    if not isinstance(model_type, str) or os.environ.get(OFF) or not _has(model_type):
        return None
    proofs = import_module(SWEEP).sweep([model_type], _cache())
    return proofs[0] if proofs else None


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
    files = [] if folder is None else [folder / "auto_mappings.py", folder / "configuration_auto.py"]
    return any(f'"{model_type}"' in file.read_text(encoding="utf-8") for file in files if file.is_file())


def _cache() -> Path | None:
    """The file of proofs; None where no file can be written, as in some containers."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keyquery"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / "proofs.jsonl" if os.access(folder, os.W_OK | os.X_OK) else None
