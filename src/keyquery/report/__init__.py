"""A Reading to notebook, page, picture and file; `report.terminal`, which needs rich, is imported by its user."""

from keyquery import instruments  # so that every instrument's kind is known
from keyquery.report.files import check_target, write_csv, write_text
from keyquery.report.notebook import html
from keyquery.report.page import write_page
from keyquery.report.picture import check_picture, plot, write_picture

__all__ = [
    "check_picture",
    "check_target",
    "html",
    "instruments",
    "plot",
    "write_csv",
    "write_page",
    "write_picture",
    "write_text",
]
