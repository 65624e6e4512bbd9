"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.geometry import Look, look

__all__ = ["Look", "look"]
