"""The geometry of every head, from weights and on data; comparisons of models."""
