"""Files that are written whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str, force: bool = True) -> None:
    """Write to a temporary name beside `path` and rename; an interrupt leaves the old file as it was.

    >>> write_text("/dev/null/x", "", force=False)
    Traceback (most recent call last):
    NotADirectoryError: [Errno 20] Not a directory: '/dev/null'
    """
    path = Path(path)
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; it is kept unless forced")
    if not path.parent.is_dir():
        error = NotADirectoryError if path.parent.exists() else FileNotFoundError
        number, reason = (20, "Not a directory") if path.parent.exists() else (2, "No such directory")
        raise error(number, reason, str(path.parent))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes private files; this one is the user's like any other
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_csv(path: str | Path, records: Sequence[dict[str, Any]], force: bool = True) -> None:
    """Records as CSV, their keys as the header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(path, text.getvalue(), force)
