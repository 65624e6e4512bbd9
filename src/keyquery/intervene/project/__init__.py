"""QK forms projected onto a structure, in a running model."""
