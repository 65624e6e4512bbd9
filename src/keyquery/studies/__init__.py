"""Published claims and our own, each re-run by one command."""

from keyquery.studies.dial import Abilities, dial_abilities
from keyquery.studies.kernels import Kernels, kernels
from keyquery.studies.objectives import Objectives, objectives

__all__ = ["Abilities", "Kernels", "Objectives", "dial_abilities", "kernels", "objectives"]
