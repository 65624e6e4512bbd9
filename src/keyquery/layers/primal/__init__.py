"""Primal-Attention: `layer` is what users see; `reference` and `triton` compute its heart, with one signature."""

from keyquery.layers.primal.causal import Prefix
from keyquery.layers.primal.features import Random
from keyquery.layers.primal.layer import PrimalAttention, regularizer
from keyquery.layers.primal.spectrum import PrimalReading

__all__ = ["Prefix", "PrimalAttention", "PrimalReading", "Random", "regularizer"]
