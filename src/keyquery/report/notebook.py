"""A Reading as a small table in a notebook."""

from __future__ import annotations

from html import escape
from typing import Any

from keyquery.reading import Reading


def html(reading: Reading) -> str:
    """The records of a reading as an HTML table; every text in it is data, never markup."""
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
