"""Labelled time series from the .ts files of the UEA and UCR archives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Shaped

from keyquery.learn.data.numbers import to_number
from keyquery.support.files import LONGEST, UNPACK, read_text
from keyquery.support.printable import TEXT, printable

DIMENSIONS = 100_000
SERIES = 300_000  # limit on the series of a compressed file, and one more per byte
SPARSE, FILLED = 1_000_000, 100  # limit of the padded values of a series: SPARSE + FILLED · values in the file


@dataclass(frozen=True, eq=False, repr=False)
class Series:
    """Labelled time series of any lengths.

    Parameters
    ----------
    values
        One array (length, dims) per series, with NaN for missing values.
    labels
        (n,): class names as text, float64 targets, or None.
    classes
        Class names, in the order of the file's header.

    See Also
    --------
    load_ts : reads them from a file.
    SeriesClassifier : takes them as X.
    """

    values: tuple[Float64[np.ndarray, "_ dims"], ...]
    labels: Shaped[np.ndarray, " n"] | None
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        lengths = sorted(len(value) for value in self.values)
        return (
            f"Series({len(self)} series, length {lengths[0]} … {lengths[-1]}, "
            f"dims {self.values[0].shape[1]}, {len(self.classes)} classes)"
        )


@dataclass(frozen=True)
class _Header:
    """The header, all lines before @data."""

    dims: int | None  # None: that of the first row
    labels: str | None  # "class", "target" or None
    classes: tuple[str, ...]


def load_ts(path: str | Path) -> Series:
    """Load a UEA or UCR .ts file.

    Lengths and missing values are taken from the data, not from the header; a dimension shorter than the others of its
    series is padded with NaN. Files with time stamps are not supported.

    Parameters
    ----------
    path
        A .ts file, plain or compressed (.ts.xz, .ts.gz).

    Returns
    -------
    Series
        Values, labels and classes; classes without names in the header are the sorted labels.

    Raises
    ------
    ValueError
        If the file is not a .ts file, with the line of the error.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "waves.ts")
    ...     size = path.write_text("@dimensions 2\\n@classLabel true up down\\n@data\\n1,2,?:3,4:up\\n5:6:down\\n")
    ...     series = load_ts(path)
    >>> series
    Series(2 series, length 1 … 3, dims 2, 2 classes)
    >>> series.values[0]
    array([[ 1.,  3.],
           [ 2.,  4.],
           [nan, nan]])
    >>> series.labels.tolist(), series.classes
    (['up', 'down'], ('up', 'down'))
    """
    stripped = ((number, line.strip()) for number, line in enumerate(read_text(path, longest=LONGEST).split("\n"), 1))
    lines = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    start = next((i for i, (_, line) in enumerate(lines) if line.lower() == "@data"), None)
    if start is None:
        raise ValueError(f"{path} is not a .ts file: it has no @data line")
    header, rows = _header(path, lines[:start]), lines[start + 1 :]
    if not rows:
        raise ValueError(f"{path} holds no series: nothing follows @data")
    if Path(path).suffix in UNPACK and len(rows) > (most := SERIES + Path(path).stat().st_size):
        raise ValueError(f"{path} decompresses to more than the limit of {most} series: decompress it first")
    values = []
    labels = []
    dims = header.dims
    for number, line in rows:
        try:
            value, label = _row(line, header, dims)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        values.append(value)
        labels.append(label)
        dims = value.shape[1]
    if header.labels is None:
        return Series(tuple(values), None, ())
    if header.labels == "target":
        return Series(tuple(values), np.array([_number(label) for label in labels]), ())
    return Series(tuple(values), np.array(labels), header.classes or tuple(sorted(set(labels))))


def _header(path: str | Path, lines: list[tuple[int, str]]) -> _Header:
    facts: dict[str, list[str]] = {}
    for number, line in lines:
        if not line.startswith("@"):
            expected = f"expected a line that begins with @ before @data, got {line!r:.60}"
            raise ValueError(f"{path}, line {number}: {expected}")
        name, *words = line[1:].split() or [""]
        facts[name.lower()] = words

    def says(name: str) -> bool:
        first = (facts.get(name) or ["false"])[0]
        if first.lower() not in ("true", "false"):
            raise ValueError(f"{path}: @{name} must be true or false, got {first!r:.60}")
        return first.lower() == "true"

    if says("timestamps"):
        raise ValueError(f"{path} has time stamps (@timestamps true), which are not supported")
    stated = " ".join(facts.get("dimensions", []))
    if stated and not (stated.isdecimal() and len(stated) < 10 and int(stated) > 0):
        raise ValueError(f"{path}: @dimensions must be an integer ≥ 1, got {stated!r:.60}")
    dims = int(stated) if stated else 1 if says("univariate") else None
    if says("classlabel"):
        return _Header(dims, "class", tuple(facts["classlabel"][1:]))
    return _Header(dims, "target" if says("targetlabel") else None, ())


def _row(line: str, header: _Header, dims: int | None) -> tuple[Float64[np.ndarray, "_ dims"], str]:
    """Values (length, dims) and label of one line."""
    parts = line.split(":")
    label = parts.pop().strip() if header.labels else ""
    if len(parts) > DIMENSIONS:
        raise ValueError(f"{len(parts)} dimensions, separated by colons; the limit is {DIMENSIONS}")
    if not parts or (dims is not None and len(parts) != dims):
        and_label = " and a label" if header.labels else ""
        raise ValueError(f"expected {dims or 'some'} dimensions{and_label}, separated by colons, got {len(parts)}")
    columns = [_numbers(part) for part in parts]
    length = max(map(len, columns))
    if length == 0:
        raise ValueError("a series without values")
    if length * len(columns) > SPARSE + FILLED * sum(map(len, columns)):
        raise ValueError(f"{len(columns)} dimensions, of which one has {length} values and most have almost none")
    values = np.full((length, len(columns)), np.nan)
    for dim, column in enumerate(columns):
        values[: len(column), dim] = column
    if header.labels == "target":
        _number(label)
    if header.classes and label not in header.classes:
        listed = printable(", ".join(header.classes), TEXT)
        raise ValueError(f"label {label!r:.60} is not one of the header's classes: {listed}")
    return values, label


def _numbers(part: str) -> list[float]:
    return [_number(text) for text in part.split(",")] if part.strip() else []


def _number(text: str) -> float:
    if text.strip() == "?":
        return float("nan")
    try:
        return to_number(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r:.60} is not a number") from None
