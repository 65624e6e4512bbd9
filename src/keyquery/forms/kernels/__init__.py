"""Triton kernels of the metrics of forms."""
