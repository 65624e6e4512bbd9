"""A Reading in a notebook: its page if it has one, else a small table."""

from __future__ import annotations

from html import escape
from typing import Any

from keyquery.kinds import show_of
from keyquery.pages.document import page
from keyquery.reading import Reading


def html(reading: Reading) -> str:
    """HTML of a reading: its page in a frame if it has one, else its records as a table; all text is escaped."""
    drawable = hasattr(show_of(reading), "page") and getattr(reading, "sketch", True)  # a path may lack its sketch
    return frame(reading) if drawable else _table(reading)


def frame(reading: Reading) -> str:
    """The page in a sandboxed frame, isolated from the notebook."""
    facts = 'width="100%" height="760" frameborder="0" sandbox="allow-scripts"'
    return f'<iframe {facts} title="{escape(reading.kind)}" srcdoc="{escape(page(reading))}"></iframe>'


def _table(reading: Reading) -> str:
    records = reading.records()
    names = list(records[0]) if records else []
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    cells = ("".join(f"<td>{escape(_cell(row[name]))}</td>" for name in names) for row in records)
    rows = "".join(f"<tr>{of_row}</tr>" for of_row in cells)
    caption = escape(f"{reading.kind} ({len(records)} rows)")
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
