"""Primal-Attention: `layer` is the module; `reference` and `kernels` are two implementations with one signature."""

from keyquery.learn.layers.primal.causal import Prefix
from keyquery.learn.layers.primal.features import Random
from keyquery.learn.layers.primal.layer import PrimalAttention
from keyquery.learn.layers.primal.spectrum import PrimalReading
from keyquery.learn.layers.primal.total_loss import regularizer

__all__ = ["Prefix", "PrimalAttention", "PrimalReading", "Random", "regularizer"]
