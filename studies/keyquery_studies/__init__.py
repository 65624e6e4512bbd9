"""Published claims and our own, each re-run by one command."""

from keyquery.studies.causes import CausesStudy, explain_blanks
from keyquery.studies.datapoints import DatapointStudy, tell_tables
from keyquery.studies.depth import DepthStudy, depths
from keyquery.studies.dial import Abilities, dial_abilities
from keyquery.studies.kernels import Kernels, kernels
from keyquery.studies.objectives import Objectives, objectives
from keyquery.studies.primal import PrimalStudy, primal
from keyquery.studies.rerank import RerankStudy, rerank
from keyquery.studies.time import TimeStudy, foretell
from keyquery.studies.transport import TransportStudy, carry
from keyquery.studies.vision_language import VisionLanguageStudy, parse
from keyquery.studies.words import WordsStudy, count_words

__all__ = [
    "Abilities",
    "CausesStudy",
    "DatapointStudy",
    "DepthStudy",
    "Kernels",
    "Objectives",
    "PrimalStudy",
    "RerankStudy",
    "TimeStudy",
    "depths",
    "TransportStudy",
    "WordsStudy",
    "VisionLanguageStudy",
    "carry",
    "count_words",
    "dial_abilities",
    "explain_blanks",
    "foretell",
    "kernels",
    "objectives",
    "parse",
    "primal",
    "rerank",
    "tell_tables",
]
