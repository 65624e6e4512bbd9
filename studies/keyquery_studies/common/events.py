"""Events from files: Stack Overflow badges, purchases of Online Retail, purchases of CDNOW."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Shaped

from keyquery.learn.data.tables import LONGEST
from keyquery.support.arrays import read_arrays
from keyquery.support.files import lines_of, read_text
from keyquery.support.printable import TEXT, printable

DAY = 86_400.0


class Timed(NamedTuple):
    """Columns of one length: types, times in days, and whose event it is."""

    types: Shaped[np.ndarray, " n"]
    times: Float64[np.ndarray, " n"]
    groups: Int[np.ndarray, " n"]


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
    """The .csv of Online Retail: an event per invoice of a known customer: a return, or a third of the purchases."""
    sums: dict[tuple[int, str], float] = {}
    dates: dict[tuple[int, str], float] = {}
    for row in _rows(path, {"InvoiceNo", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID"}):
        if not row["CustomerID"]:
            continue
        try:
            invoice = int(float(row["CustomerID"])), str(row["InvoiceNo"])
            sums[invoice] = sums.get(invoice, 0.0) + float(row["Quantity"]) * float(row["UnitPrice"])
            date = datetime.strptime(row["InvoiceDate"], "%m/%d/%Y %H:%M").replace(tzinfo=UTC)
            dates.setdefault(invoice, date.timestamp() / DAY)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: an invoice cannot be read: {printable(str(error), TEXT)}") from None
    invoices = sorted(sums, key=lambda invoice: (invoice[0], dates[invoice], invoice[1]))
    spent = np.array([sums[invoice] for invoice in invoices])
    returned = np.array([invoice[1].startswith("C") for invoice in invoices], dtype=bool)
    if returned.all():
        raise ValueError(f"{path} holds no purchase")
    thirds = np.quantile(spent[~returned], (1 / 3, 2 / 3))
    types = np.where(returned, "return", np.array(["small", "middle", "large"])[np.searchsorted(thirds, spent)])
    return Timed(types, np.array([dates[i] for i in invoices]), np.array([customer for customer, _ in invoices]))


def _rows(path: str | Path, columns: set[str]) -> Iterator[dict[str, str]]:
    """The rows of a .csv, which must have these columns."""
    rows = csv.DictReader(lines_of(read_text(path, "latin1", LONGEST)))
    try:
        if missing := columns - set(rows.fieldnames or ()):
            raise ValueError(f"{path} must have columns {', '.join(sorted(missing))}")
        yield from rows
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from None


def read_cdnow(path: str | Path) -> Timed:
    """The text of CDNOW: an event per purchase, by how many discs: "1", "2", "3" or "more"."""
    types, times, groups = [], [], []
    for number, line in enumerate(read_text(path, longest=LONGEST).splitlines(), 1):
        words = line.split()
        if not words or not words[0].isdigit():
            continue  # a header
        try:
            customer, date, count, _ = words
            times.append(float(datetime.strptime(date, "%Y%m%d").toordinal()))
            types.append(count if int(count) <= 3 else "more")
        except ValueError:
            raise ValueError(f"{path}, line {number}: expected customer, date, discs and dollars") from None
        groups.append(int(customer))
    if not types:
        raise ValueError(f"{path} holds no purchase")
    return Timed(np.array(types), np.array(times), np.array(groups))
