"""What learns from data: estimators, their layers, causal discovery, transport, depth, training and data."""
