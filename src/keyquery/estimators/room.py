"""Whether a table fits into memory, told before the work and not after it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Of a weight: itself, its gradient, two means and a direction of LAMB's, slow weights of Lookahead, the best so far.
COPIES = 7
KEPT = 20  # numbers that a layer keeps for backward, for each number of its input
FLOAT = 4  # bytes


def needed(
    columns: int, embedding: int, depth: int, categories: int, rows: int, row_attention: str
) -> tuple[float, float]:
    """Bytes that training takes about, keeping all for backward, and keeping a layer's input alone.

    A layer of width w has 13w² weights: four maps of attention, the residual's, and eight w² of its mlp.

    >>> whole, thrifty = needed(14, 128, 8, 0, 354, "full")
    >>> 4e9 < thrifty < whole < 6e9
    True
    """
    between = 0 if row_attention == "none" else (depth + 1) // 2
    wide = columns * embedding
    maps = 17 if row_attention == "induced" else 13
    weights = (
        between * maps * wide**2 + (depth - between) * 13 * embedding**2 + 2 * (categories + 4 * columns) * embedding
    )
    each = rows * wide
    fixed = FLOAT * COPIES * weights
    return fixed + FLOAT * KEPT * each * depth, fixed + FLOAT * each * (KEPT + depth)


def free(device: str) -> float:
    """Bytes of memory that are free on a device."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(torch.device(device))[0])
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    found = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not found and hasattr(os, "sysconf"):
        found = [float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")]
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdecimal():
        found.append(float(limit.read_text()) - float(used.read_text()))
    return min(found, default=float("inf"))


def require_room(
    columns: int, embedding: int, depth: int, categories: int, rows: int, row_attention: str, device: str
) -> bool:
    """Refuse what does not fit, and say whether layers must be computed again in backward for it to fit."""
    whole, thrifty = needed(columns, embedding, depth, categories, rows, row_attention)
    there = free(device)
    if thrifty > there:
        linear = "" if row_attention == "induced" else ', and row_attention="induced" takes less where rows are many'
        raise MemoryError(
            f"a table of {columns} columns, its target among them, is {columns * embedding:,} wide at "
            f"embedding={embedding}: training on {rows:,} rows would take about {thrifty / 1e9:,.0f} GB, and "
            f"{there / 1e9:,.0f} GB are free. Half the embedding takes a quarter of the weights{linear}"
        )
    return whole > there / 2
