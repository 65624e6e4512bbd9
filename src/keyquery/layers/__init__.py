"""Attention layers, and blocks built from them."""

from keyquery.layers.attention import Attention
from keyquery.layers.blocks import Block, Decoder, Encoder
from keyquery.layers.cache import Cache
from keyquery.layers.cooccurrence import CooccurrenceAttention
from keyquery.layers.datapoints import AttributeAttention, DatapointAttention, DatapointEncoder
from keyquery.layers.language_model import LanguageModel, Shape
from keyquery.layers.primal import PrimalAttention, regularizer
from keyquery.layers.time import BochnerTime, MercerTime, TimeAttention, TimeKernel
from keyquery.layers.vision import VisionEncoder

__all__ = [
    "Attention",
    "AttributeAttention",
    "Block",
    "BochnerTime",
    "Cache",
    "CooccurrenceAttention",
    "DatapointAttention",
    "DatapointEncoder",
    "Decoder",
    "Encoder",
    "LanguageModel",
    "MercerTime",
    "PrimalAttention",
    "Shape",
    "TimeAttention",
    "TimeKernel",
    "VisionEncoder",
    "regularizer",
]
