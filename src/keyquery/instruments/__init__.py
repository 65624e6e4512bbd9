"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.ablation import Ablation, ablate
from keyquery.instruments.causes import Causes, causes
from keyquery.instruments.comparison import Comparison, compare
from keyquery.instruments.explanation import Explanation, explain
from keyquery.instruments.flow import Flow, flow
from keyquery.instruments.geometry import Look, look
from keyquery.instruments.turned import Turned, turned

__all__ = [
    "Ablation",
    "Causes",
    "Comparison",
    "Explanation",
    "Flow",
    "Look",
    "Turned",
    "ablate",
    "causes",
    "compare",
    "explain",
    "flow",
    "look",
    "turned",
]
