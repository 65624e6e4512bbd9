"""Tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def columns_table(first: str, *columns: Any) -> Table:
    """A table without lines: names of columns that are figures, or texts, which may wrap."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first)
    for column in columns:
        figures = isinstance(column, str)
        table.add_column(column, justify="right" if figures else "left", no_wrap=figures)
    return table


def plain_table(first: str) -> Table:
    """A table without lines, with its first column."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first, no_wrap=True)
    return table
