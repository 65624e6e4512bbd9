"""The training loop: seeds, schedules, optimisers, early stopping, resuming, torchrun."""

from keyquery.training.loop import Log, Recipe, train
from keyquery.training.optimisers import Lamb, Lookahead, schedule

__all__ = ["Lamb", "Log", "Lookahead", "Recipe", "schedule", "train"]
