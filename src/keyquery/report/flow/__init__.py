"""Displays of attention between modalities."""
