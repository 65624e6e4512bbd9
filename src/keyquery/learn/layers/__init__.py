"""Attention layers that learn in other ways: primal, in continuous time, between datapoints, from co-occurrence."""

from keyquery.learn.layers.cooccurrence import CooccurrenceAttention
from keyquery.learn.layers.datapoints import AttributeAttention, DatapointAttention, DatapointEncoder
from keyquery.learn.layers.primal import PrimalAttention, regularizer
from keyquery.learn.layers.time import BochnerTime, MercerTime, TimeAttention, TimeKernel
from keyquery.learn.layers.vision import VisionEncoder

__all__ = [
    "AttributeAttention",
    "BochnerTime",
    "CooccurrenceAttention",
    "DatapointAttention",
    "DatapointEncoder",
    "MercerTime",
    "PrimalAttention",
    "TimeAttention",
    "TimeKernel",
    "VisionEncoder",
    "regularizer",
]
