"""Published claims and our own, each re-run by one command."""

from keyquery.studies.kernels import Kernels, kernels
from keyquery.studies.objectives import Objectives, objectives

__all__ = ["Kernels", "Objectives", "kernels", "objectives"]
