"""Attention between modalities."""
