"""fit and predict, for people who have data and want an answer."""

from keyquery.estimators.datapoints import NPTClassifier, NPTRegressor
from keyquery.estimators.events import EventModel
from keyquery.estimators.foretelling import Foretelling
from keyquery.estimators.importance import Importance
from keyquery.estimators.interactions import Interactions
from keyquery.estimators.kinds import saved_network
from keyquery.estimators.leaning import Leaning
from keyquery.estimators.series import SeriesClassifier
from keyquery.estimators.transport import TransportClassifier
from keyquery.estimators.vision_language import VisualParser

__all__ = [
    "EventModel",
    "Foretelling",
    "Importance",
    "Interactions",
    "Leaning",
    "NPTClassifier",
    "NPTRegressor",
    "SeriesClassifier",
    "TransportClassifier",
    "VisualParser",
    "saved_network",
]
