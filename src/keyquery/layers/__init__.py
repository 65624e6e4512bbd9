"""Modules that learn a kernel, and blocks built of them."""

from keyquery.layers.blocks import Block, Decoder, Encoder
from keyquery.layers.cache import Cache
from keyquery.layers.primal import PrimalAttention, regularizer
from keyquery.layers.structured import Attention
from keyquery.layers.words import LanguageModel, Shape

__all__ = [
    "Attention",
    "Block",
    "Cache",
    "Decoder",
    "Encoder",
    "LanguageModel",
    "PrimalAttention",
    "Shape",
    "regularizer",
]
