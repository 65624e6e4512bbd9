"""Continuous time in attention: encodings whose kernel depends only on the lag, and attention that uses them."""

from keyquery.layers.time.attention import TimeAttention
from keyquery.layers.time.base import TimeCode
from keyquery.layers.time.bochner import BochnerTime
from keyquery.layers.time.mercer import MercerTime
from keyquery.layers.time.reading import TimeKernel

__all__ = ["BochnerTime", "MercerTime", "TimeAttention", "TimeCode", "TimeKernel"]
