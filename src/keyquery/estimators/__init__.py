"""fit and predict, for people who have data and want an answer."""

from keyquery.checkpoints.fitted import saved_network
from keyquery.estimators.datapoints import NPTClassifier, NPTRegressor
from keyquery.estimators.events import EventModel
from keyquery.estimators.foretelling import Foretelling
from keyquery.estimators.importance import Importance
from keyquery.estimators.interactions import Interactions
from keyquery.estimators.leaning import Leaning
from keyquery.estimators.reciprocal import KReciprocalReranker
from keyquery.estimators.rerank import Reranker
from keyquery.estimators.rerankers import AffinityReranker, AlphaQueryExpansion
from keyquery.estimators.reranking import Reranking
from keyquery.estimators.series import SeriesClassifier
from keyquery.estimators.transport import TransportClassifier
from keyquery.estimators.vision_language import VisualParser

__all__ = [
    "AffinityReranker",
    "AlphaQueryExpansion",
    "EventModel",
    "Foretelling",
    "Importance",
    "Interactions",
    "KReciprocalReranker",
    "Leaning",
    "NPTClassifier",
    "NPTRegressor",
    "Reranker",
    "Reranking",
    "SeriesClassifier",
    "TransportClassifier",
    "VisualParser",
    "saved_network",
]
