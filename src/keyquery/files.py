"""Texts that are read, and files that are written, whole or not at all."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import lzma
import math
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MIB = 2**20
# What a packed file may come to, so that a small one cannot fill the memory: so many bytes, and so many times its own.
UNPACKED, RATIO = 256 * MIB, 100
DICTIONARY = 256 * MIB  # that an .xz file may ask for; the largest that xz makes by itself is a quarter of it
UNPACK: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(memlimit=DICTIONARY),
    ".gz": lambda: zlib.decompressobj(wbits=31),
}
OPEN: dict[str, Any] = {".xz": lzma.LZMAFile, ".gz": lambda raw: gzip.GzipFile(fileobj=raw)}
MARK = re.compile(r"[0-9a-f]{32}")  # what the temporary names of one run end in
BLOCK, PART = 2**19, 2**16  # bytes of a file, as it lies there, that are one piece of text; and that are read at a time


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a file, unpacked where its name ends in .xz or .gz, without a byte-order mark.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "a.txt.gz").write_bytes(zlib.compress(b"some text", wbits=31))
    ...     read_text(Path(folder, "a.txt.gz"))
    'some text'
    """
    path = Path(path)
    if not os.path.exists(path):  # a Path raises for names that are too long, such as a text itself
        raise FileNotFoundError(f"there is no file {str(path)[:300]}: a text is given as the path of its file")
    data = path.read_bytes()
    if path.suffix in UNPACK:
        data = _unpacked(path, data)
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


def _unpacked(path: Path, data: bytes) -> bytes:
    """The content of a packed file, of one stream or of several; more than a file may come to is never made."""
    most, parts, made = room_for(len(data)), [], 0
    try:
        while data:
            stream = UNPACK[path.suffix]()
            while not stream.eof:
                part = stream.decompress(data, MIB)
                made += len(part)
                if made > most:
                    raise ValueError(f"{path} unpacks to more than {most} bytes, which is refused: unpack it yourself")
                parts.append(part)
                # What is not taken yet is kept by zlib outside, by lzma inside.
                data = stream.unconsumed_tail if path.suffix == ".gz" else b""
                if not stream.eof and not data and (path.suffix == ".gz" or stream.needs_input):
                    raise ValueError(f"{path} is no whole {path.suffix} file: it ends early")
            data = stream.unused_data.lstrip(b"\0")  # padding
    except (lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is no whole {path.suffix} file: {error}") from None
    return b"".join(parts)


def room_for(size: int) -> int:
    """How many bytes a packed file of this size may come to.

    >>> room_for(0), room_for(10_000_000)
    (268435456, 1000000000)
    """
    return max(UNPACKED, RATIO * size)


def read_arrays(path: str | Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; with `names` those alone, of which each that is there.

    Nothing in it is run, and what it says of itself is checked before memory is asked for.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "a.npz"), one=np.arange(3), two=np.eye(2))
    ...     read_arrays(Path(folder, "a.npz"), "one", "three")
    {'one': array([0, 1, 2])}
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            members = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
            chosen = {name: info for name, info in members.items() if not names or name in names}
            most = room_for(path.stat().st_size)
            if sum(info.file_size for info in chosen.values()) > most:
                raise ValueError(f"it unpacks to more than {most} bytes, which is refused")
            return {name: _array(file, name, info) for name, info in chosen.items()}
    except OSError:
        raise
    except Exception as error:  # both packages raise whatever a broken file makes them stumble over
        raise ValueError(f"{path} is no readable .npz file: {str(error) or type(error).__name__}") from None


def _array(file: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    form = np.lib.format
    with file.open(info) as member:
        version = form.read_magic(member)
        header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = header(member)
        if dtype.hasobject:
            raise ValueError(f"{name} holds objects, which could run code: refused")
        if math.prod(shape) * dtype.itemsize > info.file_size:
            raise ValueError(f"{name} says that it is {shape} of {dtype}, more than its {info.file_size} bytes hold")
    with file.open(info) as member:
        found = form.read_array(member, allow_pickle=False)
    if dtype.kind == "U" and found.size and dtype.itemsize and np.ascontiguousarray(found).view("u4").max() > 0x10FFFF:
        raise ValueError(f"{name} holds what is no text")  # Python would stop at it with an error of its own
    return found


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
