"""Published claims and our own, each re-run by one command."""

from keyquery.studies.dial import Abilities, dial_abilities
from keyquery.studies.kernels import Kernels, kernels
from keyquery.studies.objectives import Objectives, objectives
from keyquery.studies.primal import PrimalStudy, primal

__all__ = ["Abilities", "Kernels", "Objectives", "PrimalStudy", "dial_abilities", "kernels", "objectives", "primal"]
