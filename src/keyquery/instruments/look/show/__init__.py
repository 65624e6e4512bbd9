"""A look in the terminal, as a figure and as a page."""

from keyquery.instruments.look.show.page import page as page
from keyquery.instruments.look.show.terminal import lines as lines
from keyquery.instruments.look.show.triangle import FIGURES as FIGURES
from keyquery.instruments.look.show.triangle import svg as svg
