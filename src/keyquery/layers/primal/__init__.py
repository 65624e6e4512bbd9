"""Primal-Attention: `layer` is the module; `reference` and `kernels` are two implementations with one signature."""

from keyquery.layers.primal.causal import Prefix
from keyquery.layers.primal.features import Random
from keyquery.layers.primal.layer import PrimalAttention
from keyquery.layers.primal.spectrum import PrimalReading
from keyquery.layers.primal.total_loss import regularizer

__all__ = ["Prefix", "PrimalAttention", "PrimalReading", "Random", "regularizer"]
