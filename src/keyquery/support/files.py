"""Reading of text files within limits, and atomic writing of files."""

from __future__ import annotations

import codecs
import csv
import io
import lzma
import os
import re
import secrets
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

MIB = 2**20
WHOLE = 1024 * MIB  # size limit of a file that is read at once
# Limit on decompressed size, so that a small file cannot fill the memory: at least UNPACKED, or RATIO times its size.
UNPACKED, RATIO = 16 * MIB, 100
INPUT = 64 * MIB  # size limit of standard input
DICTIONARY = 256 * MIB  # memory limit of an .xz file's dictionary; xz itself writes at most a quarter of it
UNPACK: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(memlimit=DICTIONARY),
    ".gz": lambda: zlib.decompressobj(wbits=31),
}
BLOCK, PART = 2**19, 2**14  # bytes on disk per piece of text, and bytes per read
LONGEST = 2**24  # characters of a line in a table
LINES = 1_000_000  # limit on lines of a compressed text, plus two per byte of the file
BREAKS = [sign.encode() for sign in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"]
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
MARK = re.compile(r"[0-9a-f]{32}")  # suffix of the temporary file names of one run


def regular(path: str | Path) -> Path:
    """Require the path of a regular file: folders are refused, and devices and pipes, which may never end."""
    path = Path(path)
    if not os.path.exists(path):  # Path.exists raises for names that are too long, such as a text itself
        raise FileNotFoundError(f"file not found: {str(path)[:300]}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a file")
    if not path.is_file():
        raise ValueError(f"{path} is a device or a pipe; expected a regular file")
    return path


def read_bytes(path: str | Path, most: int = WHOLE) -> bytes:
    """Read a regular file of at most `most` bytes."""
    path = regular(path)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size} bytes, more than the limit of {most}")
    return path.read_bytes()


def read_text(path: str | Path, encoding: str = "utf-8", longest: int | None = None) -> str:
    """Read a text file without its byte-order mark; .xz and .gz are decompressed, and `-` is standard input.

    A line of more than `longest` characters is refused, since splitting it could create too many objects.
    """
    path = Path(path)
    if str(path) == "-":
        data = _standard_input()
    elif not os.path.exists(path):
        raise FileNotFoundError(f"file not found: {str(path)[:300]} (expected the path of a text file)")
    elif path.suffix in UNPACK:
        with regular(path).open("rb") as file:
            data = b"".join(_unpacked(path, file))
        _check_lines(path, data)
    else:
        data = read_bytes(path)
    text = _decoded(path, data, lambda data: data.decode(encoding), encoding)
    if longest is not None and any(line.end() - line.start() > longest + 2 for line in LINE.finditer(text)):
        raise ValueError(f"{path} has a line longer than the limit of {longest} characters")
    return text.removeprefix("\ufeff")


def lines_of(text: str) -> Iterator[str]:
    """Lines with their ends, for csv; a StringIO would take four bytes per character."""
    return (match.group() for match in LINE.finditer(text))


def _check_lines(path: Path, data: bytes) -> None:
    """Refuse a compressed text with far more lines than bytes, since splitting it would create too many objects."""
    most = LINES + 2 * path.stat().st_size
    if sum(map(data.count, BREAKS)) > most:
        raise ValueError(f"{path} decompresses to more than the limit of {most} lines: decompress it first")


def _standard_input() -> bytes:
    data = sys.stdin.buffer.read(INPUT + 1)
    if len(data) > INPUT:
        raise ValueError(f"standard input is longer than the limit of {INPUT} bytes: use a file")
    return data


def text_pieces(path: str | Path) -> Iterator[str]:
    """Read a text file in `count_pieces` pieces, so that it may be larger than memory.

    Decompressed and checked as in `read_text`; pieces may end within a word.
    """
    path = regular(path)
    decoder, pieces = codecs.getincrementaldecoder("utf-8-sig")(), count_pieces(path)
    with path.open("rb") as raw:
        parts = _unpacked(path, raw) if path.suffix in UNPACK else iter(lambda: raw.read(PART), b"")
        for number in range(1, pieces + 1):
            piece = []
            for part in parts:
                piece.append(_decoded(path, part, decoder.decode))
                if number < pieces and raw.tell() >= number * BLOCK:
                    break
            else:
                piece.append(_decoded(path, b"", lambda data: decoder.decode(data, True)))
            yield "".join(piece)


def count_pieces(path: str | Path) -> int:
    """The number of pieces of `text_pieces`: one per half MiB on disk."""
    return max(-(-regular(path).stat().st_size // BLOCK), 1)


def _decoded(path: Path, data: bytes, decode: Callable[[bytes], str], encoding: str = "utf-8") -> str:
    if b"\0" in data and encoding == "utf-8":
        raise ValueError(f"{path} is not UTF-8 text: it contains NUL bytes, as UTF-16 does")
    try:
        return decode(data)
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ValueError(f"{path} is not {encoding.upper()} text: byte {wrong:#04x}") from None


def _unpacked(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """Decompress a file of one or more streams part by part, up to its size limit."""
    most = decompressed_limit(path.stat().st_size)
    size = 0
    data = raw.read(PART)
    try:
        while data:
            stream = UNPACK[path.suffix]()
            while not stream.eof:
                part = stream.decompress(data, MIB)
                size += len(part)
                if size > most:
                    raise ValueError(f"{path} decompresses to more than the limit of {most} bytes: decompress it first")
                yield part
                # Input that is not consumed yet is returned by zlib, and kept internally by lzma.
                data = stream.unconsumed_tail if path.suffix == ".gz" else b""
                if not stream.eof and not data and (path.suffix == ".gz" or stream.needs_input):
                    data = raw.read(PART)
                    if not data:
                        raise ValueError(f"{path} is not a valid {path.suffix} file: it ends early")
            data = stream.unused_data.lstrip(b"\0")  # padding
            while not data and (more := raw.read(PART)):
                data = more.lstrip(b"\0")
    except (lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is not a valid {path.suffix} file: {error}") from None


def decompressed_limit(size: int, least: int | None = None) -> int:
    """Limit on the decompressed size of a file: 100 times its size, but at least `least` (default: 16 MiB)."""
    return max(UNPACKED if least is None else least, RATIO * size)


def beside(folder: str | Path, name: str) -> Path:
    """The path of a file in a folder; names that lead out of the folder are refused, and devices and pipes.

    Links to regular files are followed, wherever they lead: shared storage and the hub's cache keep models as links.
    """
    folder = Path(folder)
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(f"{folder} names {name!r}, which is not a file in it: refused")
    path = folder / name
    if os.path.exists(path) and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is a device or a pipe; expected a regular file")
    return path


def find_packed(folder: str | Path, name: str) -> Path:
    """The file of this name in a folder, plain or compressed."""
    for ending in ("", *UNPACK):
        if (path := Path(folder, name + ending)).is_file():
            return path
    raise FileNotFoundError(f"{folder} has no {name}, {' or '.join(name + ending for ending in UNPACK)}")


def check_target(path: Path, force: bool) -> None:
    """Refuse a path that could not be written later: an existing file (unless forced), or a path without a folder."""
    real = _target(path)
    if real.exists() and not force:
        raise FileExistsError(f"{path} already exists; use --force to replace it")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"no folder {real.parent} to write {path.name} to")
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no write permission for {real.parent}")


def write_text(path: str | Path, text: str) -> None:
    """Write a file atomically: to a temporary file in the same folder, which is then renamed."""
    write_all({path: text})


def write_all(contents: Mapping[str | Path, str | bytes], mark: str = "") -> None:
    """Write several files, all or none: each to a temporary file first, then all are renamed.

    Temporary file names end in `mark`, so that `remove_temporaries` can delete what a killed process left.
    """
    with _replacing(contents, mark) as parts:
        for path, content in contents.items():
            with _named(path):
                parts[path].write_bytes(content if isinstance(content, bytes) else content.encode())


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a file, which is created if needed."""
    with _target(Path(path)).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def move_aside(path: Path) -> Path:
    """Rename a file to the first free name of name.1.suffix, name.2.suffix, …; returns its new path."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return path.rename(next(name for name in names if not name.exists()))


@contextmanager
def writing(path: str | Path, mark: str = "") -> Iterator[Path]:
    """A temporary path for code that writes a file itself; renamed to `path` on success.

    The temporary file name ends in `mark`, as in `write_all`.
    """
    with _replacing([path], mark) as parts, _named(path):
        yield parts[path]


def remove_temporaries(marks: Collection[str], folders: Iterable[Path]) -> None:
    """Delete temporary files of killed processes: only those whose names end in one of the marks.

    A mark is 32 random hexadecimal digits (`secrets.token_hex(16)`), so that no unrelated file ends in it.
    """
    if wrong := [mark for mark in marks if not MARK.fullmatch(mark)]:
        raise ValueError(f"marks must be 32 hexadecimal digits each, got {wrong[0]!r}")
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                ours = entry.name.startswith(".") and entry.name.rpartition(".")[2] in marks
                if ours and entry.is_file(follow_symlinks=False):
                    Path(entry).unlink(missing_ok=True)


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    """Records as CSV, with a header of all their keys; missing values are empty."""
    text = io.StringIO()
    names = dict.fromkeys(key for record in records for key in record)
    writer = csv.DictWriter(text, fieldnames=list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _target(path: Path) -> Path:
    """The file that a path refers to, with links followed, so that a link remains and its target is replaced."""
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise ValueError(f"{path} is a circular link")
    if real.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if real.exists() and not real.is_file():
        raise ValueError(f"{path} is a device or a pipe, which is never replaced; name a file")
    return real


@contextmanager
def _replacing(paths: Iterable[str | Path], mark: str) -> Iterator[dict[str | Path, Path]]:
    """An empty temporary file per path, in its folder and with its mode; all are renamed to the paths on success."""
    targets = {path: _target(Path(path)) for path in paths}
    parts: dict[str | Path, Path] = {}
    try:
        for path, real in targets.items():
            name = f".{real.name[:40]}.{secrets.token_hex(8)}"
            parts[path] = part = real.with_name(f"{name}.{mark}" if mark else name)
            with _named(path):
                part.touch(exist_ok=False)
                if real.exists():
                    part.chmod(real.stat().st_mode & 0o777)
        yield parts
        for path, real in targets.items():
            with _named(path):
                os.replace(parts[path], real)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Errors name the target, not the temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror or error}") from None
