"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.ablation import Ablation, ablate
from keyquery.instruments.causes import Causes, causes
from keyquery.instruments.comparison import Comparison, compare
from keyquery.instruments.depth import Depth, depth
from keyquery.instruments.explanation import Explanation, explain
from keyquery.instruments.flow import Flow, flow
from keyquery.instruments.geometry import Look, look
from keyquery.instruments.ranking import RankingScores, score_rankings, score_revisited
from keyquery.instruments.separation import separation_rank
from keyquery.instruments.transport import Transport, transport
from keyquery.instruments.transport_lens import TransportLens
from keyquery.instruments.turned import Turned, turned
from keyquery.instruments.words import Cooccurrence, Projection

__all__ = [
    "Ablation",
    "Causes",
    "Comparison",
    "Cooccurrence",
    "Depth",
    "Explanation",
    "Flow",
    "Look",
    "RankingScores",
    "Projection",
    "Transport",
    "TransportLens",
    "Turned",
    "ablate",
    "causes",
    "compare",
    "depth",
    "explain",
    "flow",
    "look",
    "score_rankings",
    "score_revisited",
    "transport",
    "separation_rank",
    "turned",
]
