"""Displays of readings in terminal, notebook, HTML page and figure: one kit, and the module of each kind by name."""

from keyquery.pages.document import page
from keyquery.pages.figures import check_picture, picture_bytes, plot
from keyquery.pages.notebook import html

__all__ = ["check_picture", "html", "page", "picture_bytes", "plot"]
