"""Files that are written whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def check_target(path: Path, force: bool) -> None:
    """Refuse what could not be written later: a file that exists (unless forced), a folder, a place that is not there.

    >>> check_target(Path("/none/heads.json"), force=False)
    Traceback (most recent call last):
    FileNotFoundError: no folder /none to write heads.json into
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; --force replaces it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} into")


def write_text(path: str | Path, text: str) -> None:
    """A text as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write to a temporary name beside `path` and rename; an interrupt leaves the old file as it was."""
    path = Path(os.path.realpath(path))  # a link stays a link, to the new content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_csv(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """Records as CSV, their keys as the header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(path, text.getvalue())


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
