"""A Reading to terminal, notebook, picture and file."""

from keyquery import instruments  # so that every instrument's kind is known
from keyquery.report.files import check_target, csv_text, write_all, write_csv, write_text
from keyquery.report.notebook import html
from keyquery.report.picture import plot
from keyquery.report.terminal import progress_bars, show

__all__ = [
    "check_target",
    "csv_text",
    "html",
    "instruments",
    "plot",
    "progress_bars",
    "show",
    "write_all",
    "write_csv",
    "write_text",
]
