"""Displays of causal graphs."""
