"""Surveys of many checkpoints, on one machine or a cluster: `run` analyses all of them and resumes if interrupted."""

from keyquery.survey.reading import Survey
from keyquery.survey.run import run

__all__ = ["Survey", "run"]
