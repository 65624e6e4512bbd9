"""Whether a table fits into memory, told before the work and not after it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from keyquery.layers.cpu_dropout import FEW
from keyquery.layers.datapoints import SHORT

FLOAT = 4  # bytes
HELD = 6  # copies of a weight: itself, its gradient, two means of LAMB's, Lookahead's slow weights, the best so far
STEP = 1  # and what LAMB makes while it steps
BRIEF = 0.5  # the copy in bfloat16 that a GPU has
KEPT = {"cpu": 17.5, "cuda": 13.0}  # numbers that a layer keeps for backward, for each number of its input
PASSING = 10.0  # those that its backward makes
SCORES = {"cpu": 2.25, "cuda": 1.75}  # numbers kept for each score between columns, where they are written
LOOSE, AT_MOST, ALWAYS = 70, 8e6, 5e7  # what a processor's allocator does not give back: tensors, of a size, bytes
CHUNK = 64  # rows that are predicted at a time: on a processor always as many, so that none depends on the others
CHUNKS = 8192  # the most


def needed(
    columns: int, embedding: int, depth: int, heads: int, categories: int, rows: int, row_attention: str, device: str
) -> tuple[float, float]:
    """Bytes that training takes about, keeping all for backward, and keeping a layer's input alone.

    A layer of width w has 13w² weights: four maps of attention, the residual's, and eight w² of its mlp.

    >>> whole, thrifty = needed(14, 128, 8, 8, 0, 354, "full", "cpu")
    >>> 4e9 < thrifty < whole < 7e9
    True
    """
    kind = "cuda" if torch.device(device).type == "cuda" else "cpu"
    between = 0 if row_attention == "none" else (depth + 1) // 2
    wide = columns * embedding
    maps = 17 if row_attention == "induced" else 13
    weights = FLOAT * (
        between * maps * wide**2 + (depth - between) * 13 * embedding**2 + 2 * (categories + 4 * columns) * embedding
    )
    each = FLOAT * rows * wide
    written = columns <= SHORT if kind == "cuda" else columns**2 < FEW
    scores = FLOAT * SCORES[kind] * rows * heads * columns**2 * written
    widest = each * (KEPT[kind] + PASSING) + 2 * scores
    kept = each * KEPT[kind] * depth + scores * (depth - between) + each * PASSING
    if kind == "cuda":
        parts = [(HELD + BRIEF) * weights + part for part in (kept, widest + each * depth)]
        return max(parts[0], (HELD + STEP) * weights), max(parts[1], (HELD + STEP) * weights)
    fixed = (HELD + STEP) * weights + LOOSE * min(each, AT_MOST) + ALWAYS
    return fixed + kept, fixed + widest + each * depth


def at_a_time(rows: int, wide: int, heads: int, context: int, device: torch.device) -> int:
    """How many rows to predict at a time: on a GPU a power of two, as many as half of what is free has room for.

    >>> at_a_time(1000, 640, 8, 500, torch.device("cpu"))
    64
    """
    if device.type != "cuda":
        return CHUNK
    each = FLOAT * (4 * heads * (context + 1) + (KEPT["cpu"] + PASSING) * wide)
    most = min(free(str(device)) / 2 / each, CHUNKS)
    size = CHUNK
    while 2 * size <= most and size < rows:
        size *= 2
    return size


def free(device: str) -> float:
    """Bytes of memory that are free on a device; on a GPU also those that torch holds and does not use."""
    if torch.device(device).type == "cuda":
        own = torch.device(device)
        unused = torch.cuda.memory_reserved(own) - torch.cuda.memory_allocated(own)
        return float(torch.cuda.mem_get_info(own)[0] + unused)
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
    columns: int, embedding: int, depth: int, heads: int, categories: int, rows: int, row_attention: str, device: str
) -> bool:
    """Refuse what does not fit, and say whether layers must be computed again in backward for it to fit."""
    whole, thrifty = needed(columns, embedding, depth, heads, categories, rows, row_attention, device)
    there = free(device)
    if thrifty > there:
        linear = "" if row_attention == "induced" else ', and row_attention="induced" takes less where rows are many'
        raise MemoryError(
            f"a table of {columns} columns, its target among them, is {columns * embedding:,} wide at "
            f"embedding={embedding}: training on {rows:,} rows would take about {thrifty / 1e9:,.0f} GB, and "
            f"{there / 1e9:,.0f} GB are free. Half the embedding takes a quarter of the weights{linear}"
        )
    return whole > there / 2
