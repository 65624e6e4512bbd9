"""Primal-Attention: `layer` is the module, `reference` its statement in plain torch, `kernel` the fused one."""

from keyquery.learn.layers.primal.layer import PrimalAttention, regularizer
from keyquery.learn.layers.primal.objective import PrimalReading

__all__ = ["PrimalAttention", "PrimalReading", "regularizer"]
