"""Study `kernels`."""
