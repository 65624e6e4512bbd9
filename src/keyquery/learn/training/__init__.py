"""The training loop: seeds, schedules, optimisers, early stopping, resuming, torchrun."""

from keyquery.learn.training.loop import Log, Recipe, train

__all__ = ["Log", "Recipe", "train"]
