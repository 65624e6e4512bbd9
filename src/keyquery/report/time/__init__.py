"""Displays of time kernels."""
