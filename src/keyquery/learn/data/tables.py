"""Tables of numeric and categorical columns from delimited text files."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from keyquery.support.checks import check_choice, check_count
from keyquery.support.files import UNPACK, lines_of, read_text

MISSING = frozenset(("", "?", "NA", "nan"))
COLUMNS = 100_000  # limit, since each is an array
LONGEST = 2**22  # characters per line
CELLS, DENSITY = 1_500_000, 8  # limit on cells and rows of a compressed table, and as many more per byte of the file


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """A table of numeric and categorical columns, as `load_table` reads it and estimators take it as X."""

    columns: tuple[str, ...]  # their names
    kinds: tuple[str, ...]  # "numeric" or "categorical", per column
    values: tuple[Shaped[np.ndarray, " rows"], ...]  # float64 with NaN, or int64 codes with −1 for missing ones
    categories: tuple[tuple[str, ...], ...]  # names: code i of column c is `categories[c][i]`; empty if numeric
    target: int | None = None  # index of the target column

    def __len__(self) -> int:
        return len(self.values[0])

    def __getitem__(self, column: str | int) -> Shaped[np.ndarray, " rows"]:
        return self.values[_index("column", column, self.columns)]

    def __repr__(self) -> str:
        numeric = self.kinds.count("numeric")
        target = "" if self.target is None else f", target {self.columns[self.target]!r}"
        return f"Table({len(self)} rows, {numeric} numeric and {len(self.kinds) - numeric} categorical columns{target})"


def load_table(path: str | Path, target: str | int | None = None) -> Table:
    """Load a table from a text file in UTF-8, plain or compressed (.xz, .gz); `target` is a column, by name or index.

    Columns are separated by the most frequent of tab, comma and semicolon in the first line, or by blanks if there is
    none. The first line is a header if it holds no number, and either a numeric column is below it or none of its texts
    recurs in its column; without one, columns are named "0", "1", …. A column is numeric if every value is a number or
    missing: "", "?", "NA" or "nan". For files of other forms, pass a data frame to whatever takes a Table.
    """
    rows = list(_rows(path, read_text(path, longest=LONGEST)))
    if not rows:
        raise ValueError(f"{path} is empty")
    names: tuple[str, ...] = tuple(map(str, range(len(rows[0]))))
    if _is_header(rows):
        names = _names(path, rows.pop(0))
    if not rows:
        raise ValueError(f"{path} holds a header and no rows")
    index = None if target is None else _index("target", target, names)
    kinds, values, categories = zip(*map(_column, zip(*rows, strict=True)), strict=True)
    return Table(names, kinds, values, categories, index)


def _rows(path: str | Path, text: str) -> Iterator[list[str]]:
    """Fields of every non-blank line, the same number in each; a compressed file of a few bytes has no millions."""
    first, lines = re.sub(r'"[^"]*"', "", text.lstrip().split("\n", 1)[0]), lines_of(text)
    between = max("\t,;", key=first.count)
    reader = ((number, line.split()) for number, line in enumerate(lines, 1))
    if between in first:
        table = csv.reader(lines, delimiter=between, skipinitialspace=True, strict=True)
        reader = ((table.line_num, [field.strip() for field in row]) for row in table)
    packed, width, cells = Path(path).suffix in UNPACK, None, 0
    most = CELLS + DENSITY * Path(path).stat().st_size if packed else 0
    try:
        for number, row in reader:
            if row in ([], [""]):
                continue
            width = width or len(row)
            if width > COLUMNS:
                raise ValueError(f"{path}, line {number}: {width} columns; the limit is {COLUMNS}")
            if len(row) != width:
                expected = f"expected {width} columns, as in the first row"
                raise ValueError(f"{path}, line {number}: {expected}, got {len(row)}")
            cells += width + 1
            if packed and cells > most:
                limit = f"the limit of {most} cells and rows"
                raise ValueError(f"{path} decompresses to more than {limit}: decompress it first")
            yield row
    except csv.Error as error:
        raise ValueError(f"{path}, line {table.line_num}: {error}") from None


def _is_header(rows: list[list[str]]) -> bool:
    if any(map(_is_number, rows[0])):
        return False
    named = [column for column in zip(*rows, strict=True) if column[0] not in MISSING]
    if any(column[0] in column[1:] for column in named):
        # A text that recurs: still a header if there is a numeric column below it.
        return any(_are_numbers(column[1:]) and not MISSING.issuperset(column[1:]) for column in named)
    return bool(named)


def _names(path: str | Path, row: list[str]) -> tuple[str, ...]:
    """The names of the header; a column without a name is named by its index."""
    names = tuple(name or str(index) for index, name in enumerate(row))
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        listed = ", ".join(map(repr, twice[:5]))
        raise ValueError(f"{path}: column names must be unique, got {listed} more than once in the header")
    return names


def _index(role: str, column: str | int, names: tuple[str, ...]) -> int:
    if isinstance(column, str):
        check_choice(role, column, names)
        return names.index(column)
    check_count(role, column, least=-len(names), most=len(names) - 1)
    return column % len(names)


def _column(texts: tuple[str, ...]) -> tuple[str, Shaped[np.ndarray, " rows"], tuple[str, ...]]:
    """Kind, values and categories."""
    if _are_numbers(texts):
        return "numeric", np.array([np.nan if text in MISSING else float(text) for text in texts]), ()
    names = tuple(sorted(set(texts) - MISSING))
    codes = {name: code for code, name in enumerate(names)}
    return "categorical", np.array([codes.get(text, -1) for text in texts], dtype=np.int64), names


def _are_numbers(texts: tuple[str, ...]) -> bool:
    return all(text in MISSING or _is_number(text) for text in texts)


def _is_number(text: str) -> bool:
    try:
        to_number(text)
    except ValueError:
        return False
    return True


def to_number(text: str) -> float:
    """Parse a number; unlike `float`, 1_0 is not ten."""
    if "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return float(text)
