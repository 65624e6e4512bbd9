"""Tables of numeric and categorical columns from delimited text files."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from keyquery.learn.data.numbers import to_number
from keyquery.support.checks import check_choice, check_count
from keyquery.support.files import UNPACK, lines_of, read_text

MISSING = ("", "?", "NA", "nan")
COLUMNS = 100_000  # limit, since each is an array
LONGEST = 2**22  # characters per line
CELLS, DENSITY = 1_500_000, 8  # limit on cells and rows of a compressed table, and as many more per byte of the file


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """A table of numeric and categorical columns.

    Parameters
    ----------
    columns
        Column names.
    kinds
        "numeric" or "categorical", per column.
    values
        One array (rows,) per column: float64 with NaN for missing numbers, or int64 codes with −1 for missing
        categories.
    categories
        Category names per column: code i of column c is `categories[c][i]`; empty for a numeric column.
    target
        Index of the target column. Default: None.

    See Also
    --------
    load_table : reads it from a file.
    NPTClassifier, NPTRegressor : take it as X.
    """

    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    values: tuple[Shaped[np.ndarray, " rows"], ...]
    categories: tuple[tuple[str, ...], ...]
    target: int | None = None

    def __len__(self) -> int:
        return len(self.values[0])

    def __getitem__(self, column: str | int) -> Shaped[np.ndarray, " rows"]:
        return self.values[_index("column", column, self.columns)]

    def __repr__(self) -> str:
        numeric = self.kinds.count("numeric")
        target = "" if self.target is None else f", target {self.columns[self.target]!r}"
        return f"Table({len(self)} rows, {numeric} numeric and {len(self.kinds) - numeric} categorical columns{target})"


def load_table(
    path: str | Path,
    target: str | int | None = None,
    delimiter: str | None = None,
    header: bool | str = "auto",
    missing: Collection[str] = MISSING,
    encoding: str = "utf-8",
) -> Table:
    """Load a table from a delimited text file.

    A column is numeric if every value that is not in `missing` is a number. Whitespace around fields is stripped.

    Parameters
    ----------
    path
        The file, plain or compressed (.xz, .gz).
    target
        Target column, a name or an index. Default: None.
    delimiter
        " " is any run of whitespace. Default: the most frequent of tab, comma and semicolon in the first line, or
        whitespace if there is none.
    header
        Whether the first line is a header. "auto": if it holds no number, and either a numeric column is below it or
        none of its texts recurs in its column. Without a header, columns are named "0", "1", …. Default: "auto".
    missing
        Texts of missing values. Default: "", "?", "NA", "nan".
    encoding
        Default: "utf-8".

    Returns
    -------
    Table
        Columns, their kinds, values and categories.

    Raises
    ------
    ValueError
        If rows differ in length, names occur twice, or the file is empty.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "pets.csv").write_text("kind,age\\ncat,3\\ndog,?\\ncat,5\\n")
    ...     table = load_table(Path(folder, "pets.csv"), target="kind")
    >>> table
    Table(3 rows, 1 numeric and 1 categorical columns, target 'kind')
    >>> table["age"], table["kind"], table.categories[0]
    (array([ 3., nan,  5.]), array([0, 1, 0]), ('cat', 'dog'))
    """
    if header not in ("auto", True, False):
        raise ValueError(f"header must be True, False or 'auto', got {header!r}")
    if isinstance(missing, str):
        raise TypeError(f"missing must be a list of texts, got a single text {missing!r}")
    rows = list(_within_limit(path, _rows(path, read_text(path, encoding, LONGEST), delimiter)))
    if not rows:
        raise ValueError(f"{path} is empty")
    absent = frozenset(missing)
    names: tuple[str, ...] = tuple(map(str, range(len(rows[0]))))
    if _is_header(rows, absent) if header == "auto" else header:
        names = _names(path, rows.pop(0))
    if not rows:
        raise ValueError(f"{path} holds a header and no rows; if it has no header, pass header=False")
    index = None if target is None else _index("target", target, names)
    kinds, values, categories = zip(*(_column(texts, absent) for texts in zip(*rows, strict=True)), strict=True)
    return Table(names, kinds, values, categories, index)


def _within_limit(path: str | Path, rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows; those of a compressed file of a few bytes must not fill the memory."""
    packed = Path(path).suffix in UNPACK
    most = CELLS + DENSITY * Path(path).stat().st_size if packed else None
    cells = 0
    for row in rows:
        cells += len(row) + 1
        if most is not None and cells > most:
            raise ValueError(
                f"{path} decompresses to more than the limit of {most} cells and rows: decompress it first"
            )
        yield row


def _rows(path: str | Path, text: str, delimiter: str | None) -> Iterator[list[str]]:
    """Fields of every non-blank line, the same number in each."""
    between = _delimiter(text) if delimiter is None else delimiter
    lines = lines_of(text)
    reader: Iterator[tuple[int, list[str]]]
    if between.isspace() and between != "\t":
        reader = ((number, line.split()) for number, line in enumerate(lines, 1))
    else:
        table = csv.reader(lines, delimiter=between, skipinitialspace=True, strict=True)
        reader = ((table.line_num, [field.strip() for field in row]) for row in table)
    width = None
    try:
        for number, row in reader:
            if row in ([], [""]):
                continue
            width = width or len(row)
            if width > COLUMNS:
                raise ValueError(f"{path}, line {number}: {width} columns; the limit is {COLUMNS}")
            if len(row) != width:
                raise ValueError(
                    f"{path}, line {number}: expected {width} columns, as in the first row, got {len(row)}"
                )
            yield row
    except csv.Error as error:
        raise ValueError(f"{path}, line {table.line_num}: {error}") from None


def _delimiter(text: str) -> str:
    first = re.sub(r'"[^"]*"', "", text.lstrip().split("\n", 1)[0])
    best = max("\t,;", key=first.count)
    return best if best in first else " "


def _is_header(rows: list[list[str]], missing: frozenset[str]) -> bool:
    if any(_is_number(text) for text in rows[0]):
        return False
    named = [column for column in zip(*rows, strict=True) if column[0] not in missing]
    if any(column[0] in column[1:] for column in named):
        # A text that recurs: still a header if there is a numeric column below it.
        return any(_is_numeric(column[1:], missing) for column in named)
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


def _column(
    texts: tuple[str, ...], missing: frozenset[str]
) -> tuple[str, Shaped[np.ndarray, " rows"], tuple[str, ...]]:
    """Kind, values and categories."""
    if all(text in missing or _is_number(text) for text in texts):
        numbers = [float("nan") if text in missing else float(text) for text in texts]
        return "numeric", np.array(numbers), ()
    names = tuple(sorted(set(texts) - missing))
    codes = {name: code for code, name in enumerate(names)}
    return "categorical", np.array([codes.get(text, -1) for text in texts], dtype=np.int64), names


def _is_numeric(texts: tuple[str, ...], missing: frozenset[str]) -> bool:
    present = [text for text in texts if text not in missing]
    return bool(present) and all(map(_is_number, present))


def _is_number(text: str) -> bool:
    try:
        to_number(text)
    except ValueError:
        return False
    return True
