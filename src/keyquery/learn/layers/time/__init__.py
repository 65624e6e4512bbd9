"""Continuous time in attention: encodings whose kernel depends only on the lag, and attention that uses them."""

from keyquery.learn.layers.time.attention import TimeAttention
from keyquery.learn.layers.time.base import TimeCode, TimeKernel
from keyquery.learn.layers.time.bochner import BochnerTime
from keyquery.learn.layers.time.mercer import MercerTime

__all__ = ["BochnerTime", "MercerTime", "TimeAttention", "TimeCode", "TimeKernel"]
