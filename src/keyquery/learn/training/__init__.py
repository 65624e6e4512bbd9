"""The training loop: seeds, schedules, optimisers, early stopping, resuming, torchrun."""

from keyquery.learn.training.loop import Log, Recipe, train
from keyquery.learn.training.optimisers import Lamb, Lookahead, schedule

__all__ = ["Lamb", "Log", "Lookahead", "Recipe", "schedule", "train"]
