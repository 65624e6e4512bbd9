"""Texts that are read, and files that are written, whole or not at all."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import lzma
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

UNPACK = {".xz": lzma.decompress, ".gz": gzip.decompress}
OPEN: dict[str, Any] = {".xz": lzma.LZMAFile, ".gz": lambda raw: gzip.GzipFile(fileobj=raw)}
BLOCK, PART = 2**19, 2**16  # bytes of a file, as it lies there, that are one piece of text; and that are read at a time


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
    if b"\0" in data and encoding == "utf-8":
        raise ValueError(f"{path} is not UTF-8 text: it holds NUL bytes, as UTF-16 does")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at {error.start}"
        raise ValueError(f"{path} is not {encoding.upper()} text: {found}") from None
    return text.removeprefix("\ufeff")


def text_pieces(path: str | Path) -> Iterator[str]:
    """The text of a file piece by piece, so that it may be larger than memory: `count_pieces` of them.

    Unpacked and checked as by `read_text`; pieces end anywhere, also within a word.

    >>> "".join(text_pieces("docs/index.md")) == read_text("docs/index.md")
    True
    """
    path = Path(path)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as raw:
        size, file = path.stat().st_size, OPEN.get(path.suffix, lambda raw: raw)(raw)
        for block in range(1, count_pieces(path) + 1):
            yield "".join(_parts(path, raw, file, decoder, min(block * BLOCK, size), size))


def count_pieces(path: str | Path) -> int:
    """How many pieces `text_pieces` gives: one for each half of a MiB, as the file lies there.

    >>> count_pieces("docs/index.md")
    1
    """
    return max(-(-Path(path).stat().st_size // BLOCK), 1)


def _parts(path: Path, raw: BinaryIO, file: Any, decoder: Any, end: int, size: int) -> Iterator[str]:
    """What a file holds up to a place in it."""
    while raw.tell() < end or end == size:
        try:
            data = file.read(PART)
        except (lzma.LZMAError, zlib.error, OSError, EOFError) as error:
            raise ValueError(f"{path} is no whole {path.suffix} file: {error}") from None
        if b"\0" in data:
            raise ValueError(f"{path} is not UTF-8 text: it holds NUL bytes, as UTF-16 does")
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            found = f"byte {error.object[error.start]:#04x}"
            raise ValueError(f"{path} is not UTF-8 text: {found}") from None
        if not data:
            return


def find_packed(folder: str | Path, name: str) -> Path:
    """The file of this name in a folder, as it is or packed.

    >>> find_packed("docs", "index.md").name
    'index.md'
    """
    for ending in ("", *UNPACK):
        if (path := Path(folder, name + ending)).is_file():
            return path
    raise FileNotFoundError(f"{folder} holds no {name}, {' or '.join(name + ending for ending in UNPACK)}")


def check_target(path: Path, force: bool) -> None:
    """Refuse what could not be written later: a file that exists (unless forced), and what is no file or has no folder.

    >>> check_target(Path("/none/heads.json"), force=False)
    Traceback (most recent call last):
    FileNotFoundError: no folder /none to write heads.json into
    """
    real = _target(path)
    if real.exists() and not force:
        raise FileExistsError(f"{path} exists; --force replaces it")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"no folder {real.parent} to write {path.name} into")
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write into {real.parent}")


def write_text(path: str | Path, text: str) -> None:
    """Write to a temporary name beside `path` and rename; an interrupt leaves the old file as it was."""
    write_all({path: text})


def write_all(contents: Mapping[str | Path, str | bytes]) -> None:
    """Write several files, all or none: each to a temporary name first, then all are renamed."""
    written: dict[str, Path] = {}
    try:
        for path, content in contents.items():
            real = _target(Path(path))
            try:
                _write_beside(real, content, written)
            except OSError as error:
                # The temporary name would mean nothing to the user.
                raise OSError(f"{path} could not be written: {error.strerror or error}") from None
        while written:
            name, real = next(iter(written.items()))
            os.replace(name, real)
            del written[name]
    finally:
        for name in written:
            os.unlink(name)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path` for what is too large to be held: renamed at the end, or removed on a failure.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "rows")) as beside:
    ...         size = beside.write_bytes(b"many rows")
    ...     os.listdir(folder)
    ['rows']
    """
    real = _target(Path(path))
    written: dict[str, Path] = {}
    try:
        try:
            _write_beside(real, b"", written)
            (name,) = written
            yield Path(name)
            os.replace(name, real)
            written.clear()
        except OSError as error:
            raise OSError(f"{path} could not be written: {error.strerror or error}") from None
    finally:
        for name in written:
            os.unlink(name)


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    """Records as CSV under a header of all their keys; what a record lacks stays empty.

    >>> csv_text([{"head": 0}, {"head": 1, "position": 0.5}])
    'head,position\\n0,\\n1,0.5\\n'
    """
    text = io.StringIO()
    names = dict.fromkeys(key for record in records for key in record)
    writer = csv.DictWriter(text, fieldnames=list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _target(path: Path) -> Path:
    """The file that is meant, links followed: a link stays a link, to the new content."""
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise ValueError(f"{path} is a link that leads back to itself")
    if real.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if real.exists() and not real.is_file():
        raise ValueError(f"{path} is a device or a pipe, which is never replaced; name a file")
    return real


def _write_beside(real: Path, content: str | bytes, written: dict[str, Path]) -> None:
    handle, name = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name[:40]}.")
    written[name] = real
    with os.fdopen(handle, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    os.chmod(name, real.stat().st_mode & 0o777 if real.exists() else 0o666 & ~_umask())


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
