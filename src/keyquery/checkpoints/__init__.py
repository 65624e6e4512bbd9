"""Attention heads of trained models: weights only, lazily loaded."""

from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.layer import Layer
from keyquery.checkpoints.reader import read

__all__ = ["Heads", "Layer", "read"]
