"""fit and predict, for people who have data and want an answer."""

from keyquery.estimators.importance import Importance
from keyquery.estimators.series import SeriesClassifier

__all__ = ["Importance", "SeriesClassifier"]
