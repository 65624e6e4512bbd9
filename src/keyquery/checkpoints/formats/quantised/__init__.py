"""Quantised weights, one file per format, each read back as a floating-point tensor."""
