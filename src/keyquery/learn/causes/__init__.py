"""Causal graphs from attention, and explanations along them."""
