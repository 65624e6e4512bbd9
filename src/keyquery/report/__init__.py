"""A Reading to terminal, notebook, page and picture: a folder per kind, and `registry`, which finds them by name."""

from keyquery.report.kit.figures import check_picture, picture_bytes, plot
from keyquery.report.kit.notebook import html
from keyquery.report.kit.page import page

__all__ = ["check_picture", "html", "page", "picture_bytes", "plot"]
