"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.ablation import Ablation, ablate
from keyquery.instruments.causes import Causes, causes
from keyquery.instruments.comparison import Comparison, compare
from keyquery.instruments.explanation import Explanation, explain
from keyquery.instruments.geometry import Look, look
from keyquery.instruments.transport import Transport, transport
from keyquery.instruments.transport_lens import TransportLens
from keyquery.instruments.turned import Turned, turned

__all__ = [
    "Ablation",
    "Causes",
    "Comparison",
    "Explanation",
    "Look",
    "Transport",
    "TransportLens",
    "Turned",
    "ablate",
    "causes",
    "compare",
    "explain",
    "look",
    "transport",
    "turned",
]
