"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.ablation import Ablation, ablate
from keyquery.instruments.comparison import Comparison, compare
from keyquery.instruments.geometry import Look, look
from keyquery.instruments.turned import Turned, turned

__all__ = ["Ablation", "Comparison", "Look", "Turned", "ablate", "compare", "look", "turned"]
