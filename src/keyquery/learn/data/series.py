"""Labelled time series from the .ts files of the UEA and UCR archives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Shaped

from keyquery.learn.data.tables import to_number
from keyquery.support.files import LONGEST, UNPACK, read_text
from keyquery.support.printable import TEXT, printable

DIMENSIONS = 100_000
SERIES = 300_000  # limit on the series of a compressed file, and one more per byte
SPARSE, FILLED = 1_000_000, 100  # limit of the padded values of a series: SPARSE + FILLED · values in the file


@dataclass(frozen=True, eq=False, repr=False)
class Series:
    """Labelled time series of any lengths, as `load_ts` reads them and estimators take them as X."""

    values: tuple[Float64[np.ndarray, "_ dims"], ...]  # (length, dims) per series, with NaN for missing values
    labels: Shaped[np.ndarray, " n"] | None  # class names
    classes: tuple[str, ...]  # in the order of the header

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        lengths = sorted(len(value) for value in self.values)
        return (
            f"Series({len(self)} series, length {lengths[0]} … {lengths[-1]}, "
            f"dims {self.values[0].shape[1]}, {len(self.classes)} classes)"
        )


def load_ts(path: str | Path) -> Series:
    """Load a UEA or UCR .ts file, plain or compressed (.ts.xz, .ts.gz).

    Lengths and missing values are taken from the data, not from the header; a dimension shorter than the others of its
    series is padded with NaN. Classes without names in the header are the sorted labels. Files with time stamps, and
    those of regression, are not supported.
    """
    stripped = ((number, line.strip()) for number, line in enumerate(read_text(path, longest=LONGEST).split("\n"), 1))
    lines = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    start = next((i for i, (_, line) in enumerate(lines) if line.lower() == "@data"), None)
    if start is None:
        raise ValueError(f"{path} is not a .ts file: it has no @data line")
    dims, labelled, classes = _header(path, lines[:start])
    rows = lines[start + 1 :]
    if not rows:
        raise ValueError(f"{path} holds no series: nothing follows @data")
    if Path(path).suffix in UNPACK and len(rows) > (most := SERIES + Path(path).stat().st_size):
        raise ValueError(f"{path} decompresses to more than the limit of {most} series: decompress it first")
    values, labels = list[np.ndarray](), list[str]()
    for number, line in rows:
        parts = line.split(":")
        try:
            labels.append(_label(parts.pop(), classes) if labelled else "")
            values.append(_values(parts, dims, " and a label" if labelled else ""))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        dims = values[-1].shape[1]
    if not labelled:
        return Series(tuple(values), None, ())
    return Series(tuple(values), np.array(labels), classes or tuple(sorted(set(labels))))


def _header(path: str | Path, lines: list[tuple[int, str]]) -> tuple[int | None, bool, tuple[str, ...]]:
    """The number of dimensions if it is stated, whether rows end in a label, and the classes if they are named."""
    facts: dict[str, list[str]] = {}
    for number, line in lines:
        if not line.startswith("@"):
            raise ValueError(f"{path}, line {number}: lines before @data must begin with @, got {line!r:.60}")
        name, *words = line[1:].split() or [""]
        facts[name.lower()] = words

    def says(name: str) -> bool:
        first = (facts.get(name) or ["false"])[0]
        if first.lower() not in ("true", "false"):
            raise ValueError(f"{path}: @{name} must be true or false, got {first!r:.60}")
        return first.lower() == "true"

    for name, meaning in (("timestamps", "time stamps"), ("targetlabel", "numeric targets")):
        if says(name):
            raise ValueError(f"{path} has {meaning} (@{name} true), which are not supported")
    stated = " ".join(facts.get("dimensions", ["1"] if says("univariate") else []))
    if stated and not (stated.isdecimal() and len(stated) < 10 and int(stated) > 0):
        raise ValueError(f"{path}: @dimensions must be an integer ≥ 1, got {stated!r:.60}")
    labelled = says("classlabel")
    return int(stated) if stated else None, labelled, tuple(facts["classlabel"][1:]) if labelled else ()


def _values(parts: list[str], dims: int | None, and_label: str) -> Float64[np.ndarray, "_ dims"]:
    """The values (length, dims) of one line; dimensions that are shorter than others end in NaN."""
    if len(parts) > DIMENSIONS:
        raise ValueError(f"{len(parts)} dimensions, separated by colons; the limit is {DIMENSIONS}")
    if not parts or (dims is not None and len(parts) != dims):
        raise ValueError(f"expected {dims or 'some'} dimensions{and_label}, separated by colons, got {len(parts)}")
    columns = [[_number(text.strip()) for text in part.split(",")] if part.strip() else [] for part in parts]
    length = max(map(len, columns))
    if length == 0:
        raise ValueError("a series without values")
    if length * len(columns) > SPARSE + FILLED * sum(map(len, columns)):
        raise ValueError(f"{len(columns)} dimensions, of which one has {length} values and most have almost none")
    values = np.full((length, len(columns)), np.nan)
    for dim, column in enumerate(columns):
        values[: len(column), dim] = column
    return values


def _label(text: str, classes: tuple[str, ...]) -> str:
    if classes and text.strip() not in classes:
        listed = printable(", ".join(classes), TEXT)
        raise ValueError(f"label {text.strip()!r:.60} is not one of the header's classes: {listed}")
    return text.strip()


def _number(text: str) -> float:
    try:
        return np.nan if text == "?" else to_number(text)
    except ValueError:
        raise ValueError(f"{text!r:.60} is not a number") from None
