"""A Reading to notebook, page, picture and file; `report.terminal`, which needs rich, is imported by its user."""

from keyquery import instruments, studies  # so that every kind of reading is known
from keyquery.report import page
from keyquery.report.files import check_target, csv_text, write_all, write_csv, write_text
from keyquery.report.notebook import html
from keyquery.report.picture import check_picture, picture_bytes, plot

__all__ = [
    "check_picture",
    "check_target",
    "csv_text",
    "html",
    "instruments",
    "page",
    "picture_bytes",
    "plot",
    "studies",
    "write_all",
    "write_csv",
    "write_text",
]
