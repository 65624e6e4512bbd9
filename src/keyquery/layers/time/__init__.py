"""Continuous time in attention: codes whose kernel depends on the lag alone, and attention that takes them."""

from keyquery.layers.time.attention import TimeAttention
from keyquery.layers.time.base import TimeCode
from keyquery.layers.time.bochner import BochnerTime
from keyquery.layers.time.mercer import MercerTime
from keyquery.layers.time.reading import TimeKernel

__all__ = ["BochnerTime", "MercerTime", "TimeAttention", "TimeCode", "TimeKernel"]
