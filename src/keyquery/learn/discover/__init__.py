"""Causal discovery on the columns of a table: independence tests for data, and the search over them."""
