"""The residual stream of a running model as a sum of writes: embeddings, heads, MLPs and biases."""
