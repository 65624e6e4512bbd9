"""The text of a file, packed or not."""

from __future__ import annotations

import gzip
import lzma
import zlib
from pathlib import Path

UNPACK = {".xz": lzma.decompress, ".gz": gzip.decompress}


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a file, unpacked where its name ends in .xz or .gz, without a byte-order mark.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "a.txt.gz").write_bytes(gzip.compress(b"some text"))
    ...     read_text(Path(folder, "a.txt.gz"))
    'some text'
    """
    path = Path(path)
    data = path.read_bytes()
    if path.suffix in UNPACK:
        try:
            data = UNPACK[path.suffix](data)
        except (lzma.LZMAError, zlib.error, OSError, EOFError) as error:
            raise ValueError(f"{path} is no whole {path.suffix} file: {error}") from None
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at {error.start}"
        raise ValueError(f"{path} is not {encoding.upper()} text: {found}") from None
    return text.removeprefix("\ufeff")


def to_number(text: str) -> float:
    """A number as files write it; unlike `float` it does not read 1_0 as ten.

    >>> to_number(" -2.5e3")
    -2500.0
    """
    if "_" in text:
        raise ValueError(f"{text!r} is no number")
    return float(text)
