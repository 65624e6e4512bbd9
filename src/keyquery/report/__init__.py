"""Displays of readings in terminal, notebook, HTML page and figure: a folder per kind, found by name in `registry`."""

from keyquery.report.kit.figures import check_picture, picture_bytes, plot
from keyquery.report.kit.notebook import html
from keyquery.report.kit.page import page

__all__ = ["check_picture", "html", "page", "picture_bytes", "plot"]
