"""Continuous time in attention: encodings whose kernel depends only on the lag, and attention that uses them."""

from keyquery.learn.layers.time.attention import TimeAttention
from keyquery.learn.layers.time.encodings import BochnerTime, MercerTime, TimeCode, TimeKernel

__all__ = ["BochnerTime", "MercerTime", "TimeAttention", "TimeCode", "TimeKernel"]
