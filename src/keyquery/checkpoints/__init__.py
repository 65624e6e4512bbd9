"""Heads out of trained models: files are read, the model is never built."""

from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.layer import Layer
from keyquery.checkpoints.reader import read

__all__ = ["Heads", "Layer", "read"]
