"""Tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def columns_table(first: str, *columns: Any) -> Table:
    """A table without lines: a column name as str is numeric, as Text it holds text that may wrap."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first)
    for column in columns:
        numeric = isinstance(column, str)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    return table


def plain_table(first: str) -> Table:
    """A table without lines, with only its first column."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first, no_wrap=True)
    return table
