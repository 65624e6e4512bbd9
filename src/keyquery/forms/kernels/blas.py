"""Products and eigenvalues by NumPy's BLAS and LAPACK, on a CPU.

A product XXᵀ is a rank-k update (syrk) there, at half the cost; torch has none. Only where that BLAS runs in one
thread: its idle threads wait busily, and cost more than is saved.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from keyquery.forms.derivatives import differentiated
from keyquery.support.checks import broadcast

DTYPES = (torch.float32, torch.float64)


def usable(*matrices: Tensor) -> bool:
    """Whether these functions apply to matrices, (m, n) or a batch of them."""
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.dtype in DTYPES for t in matrices)
    return plain and _single_threaded() and not differentiated(*matrices) and all(map(_in_memory, matrices))


def _in_memory(matrix: Tensor) -> bool:
    """Whether a tensor has storage; those that torch.func wraps have none."""
    try:
        matrix.data_ptr()
    except RuntimeError:
        return False
    return True


@cache
def _single_threaded() -> bool:
    """Whether NumPy was started with one thread; the command line does so."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return next((os.environ[name] for name in names if os.environ.get(name)), None) == "1"


def matmul(first: Float[Tensor, "*batch m k"], second: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch m n"]:
    """first @ second; X @ X.mT as a rank-k update, if both are views of the same memory."""
    if not usable(first, second) or first.dtype != second.dtype or first.shape[:-2] != second.shape[:-2]:
        return first @ second
    out = first.new_empty(*first.shape[:-1], second.shape[-1])
    matrices = (t.reshape(-1, *t.shape[-2:]).numpy() for t in (first, second, out))
    for left, right, product in zip(*matrices, strict=True):
        np.dot(left, right, out=product)
    return out


def square_sums(
    first: Float[Tensor, "*#batch m k"], second: Float[Tensor, "*#batch k n"], parts: int = 1
) -> Float64[Tensor, "*out parts n"]:
    """Squared lengths of the columns of first @ second, summed over each of so many equal parts of its rows.

    The product is in one piece of memory, whatever the batch: fresh memory costs as much as the sums.
    """
    if not usable(first, second) or not first.dtype == second.dtype == torch.float64:
        return (first @ second).unflatten(-2, (parts, -1)).square().sum(-2, dtype=torch.float64)
    batch, (m, n) = broadcast(first.shape[:-2], second.shape[:-2]), (first.shape[-2], second.shape[-1])
    out = first.new_empty(*batch, parts, n)
    expanded = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]).numpy() for t in (first, second, out))
    product = np.empty((parts, m // parts, n))
    for left, right, sums in zip(*expanded, strict=True):
        np.dot(left, right, out=product.reshape(m, n))
        np.einsum("pmn,pmn->pn", product, product, out=sums)
    return out


def eigenvalues(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Eigenvalues of symmetric matrices, ascending."""
    if usable(matrix):
        try:
            return torch.from_numpy(np.linalg.eigvalsh(matrix.numpy()))
        except np.linalg.LinAlgError:  # torch's own error names the matrix
            pass
    return torch.linalg.eigvalsh(matrix)
