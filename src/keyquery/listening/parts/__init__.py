"""The parts of attention scores on data: means by position, variance, shares, of self- and cross-attention."""
