"""Attention, and blocks and language models built from it."""

from keyquery.layers.attention import Attention
from keyquery.layers.blocks import Block, Decoder, Encoder
from keyquery.layers.cache import Cache
from keyquery.layers.language_model import LanguageModel, Shape

__all__ = ["Attention", "Block", "Cache", "Decoder", "Encoder", "LanguageModel", "Shape"]
