"""Instruments: a model, or its activations, in; a Reading out."""

from keyquery.instruments.ablation import Ablation, ablate
from keyquery.instruments.causes import Causes, causes
from keyquery.instruments.comparison import Comparison, compare
from keyquery.instruments.explanation import Explanation, explain
from keyquery.instruments.geometry import Look, look
from keyquery.instruments.ranking import RankingScores, score_rankings, score_revisited
from keyquery.instruments.turned import Turned, turned

__all__ = [
    "Ablation",
    "Causes",
    "Comparison",
    "Explanation",
    "Look",
    "RankingScores",
    "Turned",
    "ablate",
    "causes",
    "compare",
    "explain",
    "look",
    "score_rankings",
    "score_revisited",
    "turned",
]
