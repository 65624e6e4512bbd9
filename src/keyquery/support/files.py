"""Texts that are read, and files that are written, whole or not at all."""

from __future__ import annotations

import codecs
import csv
import io
import lzma
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MIB = 2**20
WHOLE = 1024 * MIB  # of a file that is read whole
# What a packed file may come to, so that a small one cannot fill the memory: so many bytes, and so many times its own.
UNPACKED, RATIO = 16 * MIB, 100
INPUT = 64 * MIB  # of standard input
DICTIONARY = 256 * MIB  # that an .xz file may ask for; the largest that xz makes by itself is a quarter of it
UNPACK: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(memlimit=DICTIONARY),
    ".gz": lambda: zlib.decompressobj(wbits=31),
}
BLOCK, PART = 2**19, 2**14  # bytes of a file, as it lies there, that are one piece of text; and that are read at a time
LONGEST = 2**24  # letters of a line in a table
LINES = 1_000_000  # of a packed text, and two for each of its bytes
BREAKS = [sign.encode() for sign in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"]
MARK = re.compile(r"[0-9a-f]{32}")  # what the temporary names of one run end in


def regular(path: str | Path) -> Path:
    """A path to a regular file: folders are refused, and devices and pipes, which may never end.

    >>> regular("/dev/null")
    Traceback (most recent call last):
    ValueError: /dev/null is a device or a pipe; expected a regular file
    """
    path = Path(path)
    if not os.path.exists(path):  # a Path raises for names that are too long, such as a text itself
        raise FileNotFoundError(f"there is no file {str(path)[:300]}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a file")
    if not path.is_file():
        raise ValueError(f"{path} is a device or a pipe; expected a regular file")
    return path


def read_bytes(path: str | Path, most: int = WHOLE) -> bytes:
    """The bytes of a regular file of at most so many.

    >>> len(read_bytes("docs/index.md")) > 0
    True
    """
    path = regular(path)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size} bytes; at most {most} are read whole")
    return path.read_bytes()


def read_text(path: str | Path, encoding: str = "utf-8", longest: int | None = None) -> str:
    """The text of a file, unpacked where its name ends in .xz or .gz, without a byte-order mark; `-` is standard input.

    A line of more than `longest` letters is refused: what cuts it at commas would make an object of each.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "a.txt.gz").write_bytes(zlib.compress(b"some text", wbits=31))
    ...     read_text(Path(folder, "a.txt.gz"))
    'some text'
    """
    path = Path(path)
    if str(path) == "-":
        data = _standard_input()
    elif not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {str(path)[:300]}: a text is given as the path of its file")
    elif path.suffix in UNPACK:
        with regular(path).open("rb") as file:
            data = b"".join(_unpacked(path, file))
        _check_lines(path, data)
    else:
        data = read_bytes(path)
    if b"\0" in data and encoding == "utf-8":
        raise ValueError(f"{path} is not UTF-8 text: it holds NUL bytes, as UTF-16 does")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at {error.start}"
        raise ValueError(f"{path} is not {encoding.upper()} text: {found}") from None
    if longest is not None:
        _check_length(path, text, longest)
    return text.removeprefix("\ufeff")


def _check_lines(path: Path, data: bytes) -> None:
    """Refuse a packed text of far more lines than bytes: what splits it would make an object of each."""
    most = LINES + 2 * path.stat().st_size
    if sum(map(data.count, BREAKS)) > most:
        raise ValueError(f"{path} unpacks to more than {most} lines, which is refused: unpack it yourself")


def _check_length(path: Path, text: str, longest: int) -> None:
    start = 0
    while len(text) - start > longest:
        end = max(text.rfind(sign, start, start + longest + 1) for sign in "\n\r")
        if end < 0:
            raise ValueError(f"{path} has a line of more than {longest} letters, which is refused")
        start = end + 1


def _standard_input() -> bytes:
    data = sys.stdin.buffer.read(INPUT + 1)
    if len(data) > INPUT:
        raise ValueError(f"standard input has more than {INPUT} bytes, which are not read: give a file")
    return data


def text_pieces(path: str | Path) -> Iterator[str]:
    """The text of a file piece by piece, so that it may be larger than memory: `count_pieces` of them.

    Unpacked and checked as by `read_text`; pieces end anywhere, also within a word.

    >>> "".join(text_pieces("docs/index.md")) == read_text("docs/index.md")
    True
    """
    path = regular(path)
    decoder, pieces = codecs.getincrementaldecoder("utf-8-sig")(), count_pieces(path)
    waiting: list[str] = []
    done = 0
    with path.open("rb") as raw:
        for part in _unpacked(path, raw) if path.suffix in UNPACK else iter(lambda: raw.read(PART), b""):
            waiting.append(_decoded(path, decoder, part))
            if raw.tell() >= (done + 1) * BLOCK and done < pieces - 1:
                yield "".join(waiting)
                waiting, done = [], done + 1
    yield "".join([*waiting, _decoded(path, decoder, b"", final=True)])
    yield from [""] * (pieces - done - 1)


def count_pieces(path: str | Path) -> int:
    """How many pieces `text_pieces` gives: one for each half of a MiB, as the file lies there.

    >>> count_pieces("docs/index.md")
    1
    """
    return max(-(-regular(path).stat().st_size // BLOCK), 1)


def _decoded(path: Path, decoder: Any, data: bytes, final: bool = False) -> str:
    if b"\0" in data:
        raise ValueError(f"{path} is not UTF-8 text: it holds NUL bytes, as UTF-16 does")
    try:
        text: str = decoder.decode(data, final)
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x}"
        raise ValueError(f"{path} is not UTF-8 text: {found}") from None
    return text


def _unpacked(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """The content of a packed file, of one stream or of several, part by part, up to what it may come to."""
    most, made, data = room_for(path.stat().st_size), 0, raw.read(PART)
    try:
        while data:
            stream = UNPACK[path.suffix]()
            while not stream.eof:
                part = stream.decompress(data, MIB)
                made += len(part)
                if made > most:
                    raise ValueError(f"{path} unpacks to more than {most} bytes, which is refused: unpack it yourself")
                yield part
                # What is not taken yet is kept by zlib outside, by lzma inside.
                data = stream.unconsumed_tail if path.suffix == ".gz" else b""
                if not stream.eof and not data and (path.suffix == ".gz" or stream.needs_input):
                    data = raw.read(PART)
                    if not data:
                        raise ValueError(f"{path} is no whole {path.suffix} file: it ends early")
            data = stream.unused_data.lstrip(b"\0")  # padding
            while not data and (more := raw.read(PART)):
                data = more.lstrip(b"\0")
    except (lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is no whole {path.suffix} file: {error}") from None


def room_for(size: int, least: int | None = None) -> int:
    """How many bytes a packed file of this size may come to: 100 times its own, or `least` (default: 16 MiB).

    >>> room_for(0), room_for(10_000_000)
    (16777216, 1000000000)
    """
    return max(UNPACKED if least is None else least, RATIO * size)


def beside(folder: str | Path, name: str) -> Path:
    """Where a file of this name lies in a folder; a link that leads out of the folder is refused.

    Links into the `blobs` of the Hugging Face hub's cache are followed: that is how its library keeps models.

    >>> beside("docs", "index.md").name
    'index.md'
    >>> beside("docs", "../README.md")
    Traceback (most recent call last):
    ValueError: docs names '../README.md', which is no file in it: refused
    """
    folder = Path(folder)
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(f"{folder} names {name!r}, which is no file in it: refused")
    here, real = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if here not in real.parents and not blob:
        raise ValueError(
            f"{folder / name} is a link that leads out of its folder, to {real}: refused; put a copy in its place"
        )
    return folder / name


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


def write_all(contents: Mapping[str | Path, str | bytes], mark: str = "") -> None:
    """Write several files, all or none: each to a temporary name first, then all are renamed.

    Temporary names end in `mark`, so that `remove_temporaries` can delete what a killed process left.
    """
    written: dict[str, Path] = {}
    try:
        for path, content in contents.items():
            real = _target(Path(path))
            try:
                _write_beside(real, content, written, mark)
            except OSError as error:
                # The temporary name would mean nothing to the user.
                raise OSError(f"{path} could not be written: {error.strerror or error}") from None
        while written:
            name, real = next(iter(written.items()))
            os.replace(name, real)
            del written[name]
    finally:
        for name in written:
            Path(name).unlink(missing_ok=True)


def append_line(path: str | Path, line: str) -> None:
    """Add a line to a file, or make the file of it."""
    with _target(Path(path)).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


@contextmanager
def writing(path: str | Path, mark: str = "") -> Iterator[Path]:
    """A temporary name beside `path` for what writes files by itself; renamed to `path` where nothing went wrong.

    The temporary name ends in `mark`, as in `write_all`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with writing(Path(folder, "a.pt")) as part:
    ...         torch.save(torch.ones(2), part)
    ...     torch.load(Path(folder, "a.pt"))
    tensor([1., 1.])
    """
    real = _target(Path(path))
    written: dict[str, Path] = {}
    try:
        try:
            _write_beside(real, b"", written, mark)
            (name,) = written
            yield Path(name)
            os.replace(name, real)
            written.clear()
        except OSError as error:
            raise OSError(f"{path} could not be written: {error.strerror or error}") from None
    finally:
        for name in written:
            Path(name).unlink(missing_ok=True)


def remove_temporaries(marks: Collection[str], folders: Iterable[Path]) -> None:
    """Delete temporary files of processes that were killed: those whose names end in a mark of theirs, nothing else.

    A mark is 32 random hexadecimal digits (`secrets.token_hex(16)`): no file of anyone else ends in it.

    >>> remove_temporaries(["bak"], [Path("docs")])
    Traceback (most recent call last):
    ValueError: marks must be 32 hexadecimal digits each, got 'bak'
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


def _write_beside(real: Path, content: str | bytes, written: dict[str, Path], mark: str) -> None:
    handle, name = tempfile.mkstemp(f".{mark}" if mark else "", f".{real.name[:40]}.", real.parent)
    written[name] = real
    with os.fdopen(handle, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    os.chmod(name, real.stat().st_mode & 0o777 if real.exists() else 0o666 & ~_umask())


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
