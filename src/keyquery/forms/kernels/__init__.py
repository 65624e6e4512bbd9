"""Fast kernels of the metrics of forms: by Triton on a GPU, by NumPy's BLAS on a CPU."""
