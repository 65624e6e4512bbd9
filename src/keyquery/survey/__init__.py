"""Many checkpoints, many machines: `run` looks at all of them, and goes on where it was broken off."""

from keyquery.survey.reading import Survey
from keyquery.survey.run import run

__all__ = ["Survey", "run"]
