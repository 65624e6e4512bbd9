"""Triton kernels of a primal layer; imported on use, since triton is an optional dependency."""
