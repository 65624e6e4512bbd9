"""Shared by the Triton kernels of a primal layer: loading and storing of tiles, and compile-time constants."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keyquery.layers.triton_support import blocks, kernel, launch, power_of_two

COLUMNS = 128  # per program of `column_sums`


@kernel
def inside(row, column, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Which entries of a tile lie within a matrix; columns are checked only if the tile is wider."""
    within = row[:, None] < rows
    if COLUMNS != WIDTH:
        within = within & (column[None, :] < COLUMNS)
    return within


@kernel
def load(base, row, column, stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile of a matrix with contiguous rows; 0 beyond its edges."""
    at = base + (row[:, None] * stride + column[None, :])
    return tl.load(at, mask=inside(row, column, rows, COLUMNS, WIDTH), other=0.0)


@kernel
def small(base, row, column, row_stride, column_stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load a small matrix, or its transpose."""
    at = base + row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(at, mask=inside(row, column, rows, COLUMNS, WIDTH), other=0.0)


@kernel
def store(base, value, row, column, stride, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile in a matrix with contiguous rows."""
    at = base + (row[:, None] * stride + column[None, :])
    tl.store(at, value.to(base.dtype.element_ty), mask=inside(row, column, rows, COLUMNS, WIDTH))


@kernel
def column_sums(parts, out, number, rows, columns, TURNS: tl.constexpr):
    """Sums over the rows of a matrix, of 128 columns."""
    column = number * 128 + tl.arange(0, 128)
    total = tl.zeros((32, 128), dtype=tl.float32)
    for turn in tl.range(0, TURNS):
        row = turn * 32 + tl.arange(0, 32)
        within = (row[:, None] < rows) & (column[None, :] < columns)
        total += tl.load(parts + row[:, None].to(tl.int64) * columns + column[None, :], mask=within, other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < columns)


@kernel
def _part_sums(x, parts, rows, columns, row_stride, column_stride, TURNS: tl.constexpr):
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    total = tl.zeros((32, 128), dtype=tl.float32)
    for turn in tl.range(0, TURNS):
        for part in tl.static_range(4):  # loads of several tiles at once
            row = ((tl.program_id(0) * TURNS + turn) * 4 + part) * 32 + tl.arange(0, 32)
            within = (row[:, None] < rows) & (column[None, :] < columns)
            at = row[:, None].to(tl.int64) * row_stride + column[None, :] * column_stride
            total += tl.load(x + at, mask=within, other=0.0)
    tl.store(parts + tl.program_id(0) * columns + column, tl.sum(total, 0), mask=column < columns)


def part_sums(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "parts columns"]:
    """Sums over some rows each, for `column_sums`; torch's own are several times slower for tall matrices."""
    rows, columns = x.shape
    count = min(turns(rows, 128), 2)
    parts = torch.empty(blocks(rows, 128 * count), columns, dtype=torch.float32, device=x.device)
    grid = len(parts), blocks(columns, COLUMNS)
    launch(_part_sums, grid, (x, parts), (rows, columns, *x.stride()), (("TURNS", count),))
    return parts


def widths(**sizes: int) -> dict[str, int]:
    """Compile-time sizes of a kernel; in capitals those of its tiles, at least 16 for a dot product."""
    return sizes | {name.upper(): max(16, power_of_two(size)) for name, size in sizes.items()}


def turns(count: int, block: int) -> int:
    """Turns of a loop over blocks, rounded up to a power of two, so that few kernels are compiled."""
    return power_of_two(max(1, blocks(count, block)))


def products(x: Tensor, dtype: torch.dtype) -> tuple[tuple[str, Any], ...]:
    """Dtype and precision of a kernel's products."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    # The interpreter, used on a CPU, does not support products in bfloat16.
    dot = dtype if x.is_cuda else torch.float32
    return ("DOT", dot), ("PRECISION", "ieee" if exact else "tf32")


def flags(real: Tensor | None, other: Tensor) -> Tensor:
    """A mask as integers that a kernel can load; `other` as a placeholder if there is none."""
    return other if real is None else real.contiguous().view(torch.uint8)
