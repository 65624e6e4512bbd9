"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.comparison import Comparison, compare
from keyquery.instruments.geometry import Look, look

__all__ = ["Comparison", "Look", "compare", "look"]
