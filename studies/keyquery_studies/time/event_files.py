"""Events from three files: Stack Overflow badges, purchases of Online Retail, purchases of CDNOW."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Shaped

from keyquery.learn.data.tables import LONGEST
from keyquery.support.arrays import read_arrays
from keyquery.support.files import lines_of, read_text
from keyquery.support.printable import TEXT, printable

DAY = 86_400.0
TEST = 0.2  # of the groups, the same ones for every seed


class Timed(NamedTuple):
    """Columns of one length: types, times in days and who, and what was left out of the file."""

    types: Shaped[np.ndarray, " n"]
    times: Float64[np.ndarray, " n"]
    groups: Int[np.ndarray, " n"]
    left_out: str = ""


def read_badges(path: str | Path) -> Timed:
    """An .npz of `time` (seconds), `event`, and `offsets`: user i has rows offsets[i] up to offsets[i + 1]."""
    try:
        arrays = read_arrays(path, "time", "event", "offsets")
        times, types, offsets = (arrays[name] for name in ("time", "event", "offsets"))
        times, offsets = times.astype(np.float64), offsets.astype(np.int64)
        if not times.ndim == types.ndim == offsets.ndim == 1 or len(offsets) < 2:
            raise ValueError("each must be a list")
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path} must be an .npz file with arrays time, event and offsets: {error}") from None
    lengths = np.diff(offsets)
    if len(times) != len(types) or offsets[0] != 0 or offsets[-1] != len(times) or (lengths < 0).any():
        raise ValueError(f"{path}: offsets must rise from 0 to {len(times)}, as many as there are times and events")
    return Timed(types, times / DAY, np.repeat(np.arange(len(lengths)), lengths))


def read_retail(path: str | Path) -> Timed:
    """The .csv of Online Retail: one event an invoice, by what it comes to: a return, or a third of the purchases.

    Rows without a customer cannot be followed, and are left out.
    """
    rows = retail_rows(path, {"InvoiceNo", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID"})
    sums: dict[tuple[int, str], float] = {}
    when: dict[tuple[int, str], float] = {}
    unknown = 0
    for row in rows:
        if not row["CustomerID"]:
            unknown += 1
            continue
        try:
            bill = int(float(row["CustomerID"])), str(row["InvoiceNo"])
            sums[bill] = sums.get(bill, 0.0) + float(row["Quantity"]) * float(row["UnitPrice"])
            if bill not in when:
                when[bill] = retail_time(row)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: an invoice cannot be read: {printable(str(error), TEXT)}") from None
    if not any(not bill[1].startswith("C") for bill in sums):
        raise ValueError(f"{path} holds no purchase")
    bills = sorted(sums, key=lambda bill: (bill[0], when[bill], bill[1]))
    spent = np.array([sums[bill] for bill in bills])
    back = np.array([bill[1].startswith("C") for bill in bills])
    thirds = np.quantile(spent[~back], (1 / 3, 2 / 3))
    types = np.where(back, "return", np.array(["small", "middle", "large"])[np.searchsorted(thirds, spent)])
    times, groups = np.array([when[bill] for bill in bills]), np.array([bill[0] for bill in bills])
    return Timed(types, times, groups, f"{unknown:,} rows without a customer")


def retail_rows(path: str | Path, columns: set[str]) -> Iterator[dict[str, str]]:
    """The rows of Online Retail, which must have these columns."""
    rows = csv.DictReader(lines_of(read_text(path, "latin1", LONGEST)))
    try:
        if missing := columns - set(rows.fieldnames or ()):
            raise ValueError(f"{path} must have columns {', '.join(sorted(missing))}")
        yield from rows
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from None


def retail_time(row: Mapping[str, str]) -> float:
    """When a row of it was sold, in days."""
    return datetime.strptime(row["InvoiceDate"], "%m/%d/%Y %H:%M").replace(tzinfo=UTC).timestamp() / DAY


def read_cdnow(path: str | Path) -> Timed:
    """The text of CDNOW: one event a purchase, by how many discs: "1", "2", "3" or "more"."""
    types, times, groups = [], [], []
    for number, line in enumerate(read_text(path, longest=LONGEST).splitlines(), 1):
        words = line.split()
        if not words or not words[0].isdigit():
            continue  # a header
        try:
            who, date, count, _ = words
            day = datetime.strptime(date, "%Y%m%d").toordinal()
            types.append(count if int(count) <= 3 else "more")
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: expected customer, date, discs and dollars, got {line!r:.100}"
            ) from None
        times.append(float(day))
        groups.append(int(who))
    if not types:
        raise ValueError(f"{path} holds no purchase")
    return Timed(np.array(types), np.array(times), np.array(groups))


READERS: dict[str, Callable[[str | Path], Timed]] = {
    "badges": read_badges,
    "retail": read_retail,
    "cdnow": read_cdnow,
}


@lru_cache(maxsize=2)
def split(path: Path) -> tuple[Timed, Timed]:
    """Events of groups to learn from, and of groups to test on."""
    with np.load(path, allow_pickle=False) as arrays:
        events = Timed(arrays["types"], arrays["times"], arrays["groups"])
    names = np.unique(events.groups)
    chosen = np.random.default_rng(0).permutation(names)[: round(TEST * len(names))]
    apart = np.isin(events.groups, chosen)
    learned, test = (Timed(events.types[rows], events.times[rows], events.groups[rows]) for rows in (~apart, apart))
    return learned, test
