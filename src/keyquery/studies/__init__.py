"""Published claims and our own, each re-run by one command."""

from keyquery.studies.objectives import Objectives, objectives

__all__ = ["Objectives", "objectives"]
