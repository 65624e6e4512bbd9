"""Causal graphs over the columns of a table."""
