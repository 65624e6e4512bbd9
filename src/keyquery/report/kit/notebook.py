"""A Reading in a notebook: as its page where it has one, else as a small table."""

from __future__ import annotations

from html import escape
from typing import Any

from keyquery.instruments.transport import Transport
from keyquery.reading import Reading
from keyquery.report.page import PAGED, frame


def html(reading: Reading) -> str:
    """The page of a reading that has one, the records of another as a table; every text is data, never markup."""
    bare = isinstance(reading, Transport) and not reading.sketch
    return frame(reading) if isinstance(reading, PAGED) and not bare else _table(reading)


def _table(reading: Reading) -> str:
    records = reading.records()
    names = list(records[0]) if records else []
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row[name]))}</td>" for name in names) + "</tr>" for row in records
    )
    caption = escape(f"{reading.kind} ({len(records)} rows)")
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
