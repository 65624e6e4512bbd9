"""Eigenvalues of many small symmetric or skew matrices on a GPU: one program reduces a matrix to tridiagonal form.

Householder reflections keep a symmetric matrix symmetric and a skew one skew; a skew tridiagonal matrix has the
eigenvalues ±iλ of the symmetric one with zeros on its diagonal. Eigenvalues then come by bisection, all at once: the
number of negative pivots of T − x is the number of eigenvalues below x. Their error is that of rounding, about
1e-15·‖A‖. cuSOLVER takes ten times as long for matrices of this size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

ROWS = 16  # rows of a matrix that are in registers at a time
VALUES = 32  # eigenvalues of a program
STEPS = 60  # halvings of an interval: more than float64 has bits


def eigenvalues(
    matrices: Float[Tensor, "batch n n"], signs: Float[Tensor, " batch"] | None = None
) -> Float[Tensor, "batch n"]:
    """Eigenvalues, ascending: of symmetric matrices, or of −i times those that are skew, where `signs` is −1."""
    count, n = matrices.shape[:2]
    work = matrices.contiguous().clone()
    signs = work.new_ones(count) if signs is None else signs
    diagonal, beside, out = work.new_zeros(count, n), work.new_zeros(count, n), work.new_empty(count, n)
    side = max(triton.next_power_of_2(n), ROWS)
    _reduce[(count,)](work, signs, beside, torch.empty_like(diagonal), n, side, ROWS, num_warps=8)
    diagonal = work.diagonal(dim1=-2, dim2=-1).contiguous()
    if n > 1:
        beside[:, n - 2] = work[:, n - 1, n - 2]
    near = diagonal.abs() + beside.abs()
    near[:, 1:] += beside[:, :-1].abs()
    bound = near.amax(1) * (1 + 1e-12)  # by Gershgorin
    _bisect[(count, triton.cdiv(n, VALUES))](diagonal, beside, bound, out, n, VALUES, STEPS, num_warps=1)
    return out


@triton.jit
def _reduce(matrices, signs, beside, scratch, n: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr):
    """A matrix to tridiagonal form, in place: its diagonal, and beside it what `beside` holds."""
    number = tl.program_id(0)
    matrix = matrices + number * n * n
    products = scratch + number * n
    sign = tl.load(signs + number)
    columns = tl.arange(0, SIDE)
    for k in range(0, n - 2):
        inside = (columns > k) & (columns < n)
        column = sign * tl.load(matrix + k * n + columns, mask=inside, other=0.0)
        first = tl.sum(tl.where(columns == k + 1, column, 0.0))
        norm = tl.sqrt(tl.sum(column * column))
        new = tl.where(first > 0, -norm, norm)
        vector = tl.where(columns == k + 1, column - new, column)
        size = norm * (norm + tl.abs(first))
        beta = tl.where(size > 0, 1.0 / tl.where(size > 0, size, 1.0), 0.0)
        for row in range(0, n, ROWS):
            rows = row + tl.arange(0, ROWS)
            below = (rows > k) & (rows < n)
            if row + ROWS > k + 1:
                here = matrix + rows[:, None] * n + columns[None, :]
                tile = tl.load(here, mask=below[:, None] & inside[None, :], other=0.0)
                tl.store(products + rows, beta * tl.sum(tile * vector[None, :], 1), mask=below)
        tl.debug_barrier()
        product = tl.load(products + columns, mask=inside, other=0.0)
        half = beta / 2 * tl.sum(product * vector)
        other = product - half * vector
        for row in range(0, n, ROWS):
            rows = row + tl.arange(0, ROWS)
            below = (rows > k) & (rows < n)
            if row + ROWS > k + 1:
                cut = sign * tl.load(matrix + k * n + rows, mask=below, other=0.0)
                cut = tl.where(rows == k + 1, cut - new, cut)
                along = tl.load(products + rows, mask=below, other=0.0) - half * cut
                here = matrix + rows[:, None] * n + columns[None, :]
                tile = tl.load(here, mask=below[:, None] & inside[None, :], other=0.0)
                tile -= along[:, None] * vector[None, :] + sign * cut[:, None] * other[None, :]
                tl.store(here, tile, mask=below[:, None] & inside[None, :])
        tl.debug_barrier()
        tl.store(beside + number * n + k, new)


@triton.jit
def _bisect(diagonal, beside, bounds, out, n: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr):
    """Some eigenvalues of a symmetric tridiagonal matrix."""
    number = tl.program_id(0)
    wanted = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    bound = tl.load(bounds + number)
    high = tl.zeros([VALUES], tl.float64) + bound
    low = -high
    tiny = 1e-30 * bound + 1e-300
    for _ in range(0, STEPS):
        middle = (low + high) / 2
        pivot = tl.load(diagonal + number * n) - middle
        pivot = tl.where(tl.abs(pivot) < tiny, -tiny, pivot)  # before it is counted
        below = (pivot < 0).to(tl.int32)
        for i in range(1, n):
            off = tl.load(beside + number * n + i - 1)
            pivot = tl.load(diagonal + number * n + i) - middle - off * off / pivot
            pivot = tl.where(tl.abs(pivot) < tiny, -tiny, pivot)
            below += (pivot < 0).to(tl.int32)
        high = tl.where(below > wanted, middle, high)
        low = tl.where(below > wanted, low, middle)
    tl.store(out + number * n + wanted, (low + high) / 2, mask=wanted < n)
