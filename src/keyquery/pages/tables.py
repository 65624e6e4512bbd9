"""Tables in the terminal. rich is imported on use: figures and pages of the same module do not need it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
else:

    class _Late:
        """A class of rich, imported when it is called or asked for a method."""

        def __init__(self, module: str, name: str) -> None:
            self._class = lambda: getattr(import_module(module), name)

        def __call__(self, *values: Any, **options: Any) -> Any:
            return self._class()(*values, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._class(), name)

    Table, Text = _Late("rich.table", "Table"), _Late("rich.text", "Text")

__all__ = ["Table", "Text", "columns_table"]


def columns_table(first: str, *columns: Any) -> Any:
    """A table without lines: a column name as str is numeric, as Text it holds text that may wrap."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first)
    for column in columns:
        numeric = isinstance(column, str)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    return table
