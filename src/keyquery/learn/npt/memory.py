"""Estimate of the memory that training on a table takes, checked before training starts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from keyquery.learn.layers.cpu_dropout import FEW
from keyquery.learn.layers.datapoints import SHORT

FLOAT = 4  # bytes
HELD = 6  # copies of a weight: itself, its gradient, two LAMB moments, Lookahead's slow weights, the best so far
STEP = 1  # and the temporary copy of a LAMB step
BRIEF = 0.5  # the bfloat16 copy on a GPU
KEPT = {"cpu": 17.5, "cuda": 13.0}  # activations kept for backward by a layer, per number of its input
PASSING = 10.0  # temporaries of backward, per number of the input
AGAIN = 10.0  # what a layer takes that is computed again on a GPU, where backward frees as it goes, likewise
SCORES = {"cpu": 2.25, "cuda": 1.75}  # numbers kept per score between columns, if scores are materialised
LOOSE, AT_MOST, ALWAYS = 70, 8e6, 5e7  # memory that the CPU allocator does not return: tensors, bytes each, bytes
CHUNK = 64  # rows per prediction batch; constant on a CPU, so that a row's result does not depend on the others
CHUNKS = 8192  # the largest batch on a GPU


def needed(
    columns: int, embedding: int, depth: int, heads: int, categories: int, rows: int, row_attention: str, device: str
) -> tuple[float, float]:
    """Approximate bytes that training takes, without and with activation checkpointing.

    A layer of width w has 13w² weights: four of attention, one of the residual, and 8w² of the MLP. Predictions for the
    validation rows are not counted: on a GPU they take as many rows at a time as fit into half of what is free.
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
        parts = [(HELD + BRIEF) * weights + part for part in (kept, each * (AGAIN + depth) + scores)]
        return max(parts[0], (HELD + STEP) * weights), max(parts[1], (HELD + STEP) * weights)
    fixed = (HELD + STEP) * weights + LOOSE * min(each, AT_MOST) + ALWAYS
    return fixed + kept, fixed + widest + each * depth


def at_a_time(rows: int, wide: int, heads: int, context: int, device: torch.device) -> int:
    """Rows per prediction batch: on a GPU the largest power of two that fits into half of the free memory."""
    if device.type != "cuda":
        return CHUNK
    each = FLOAT * (4 * heads * (context + 1) + (KEPT["cpu"] + PASSING) * wide)
    most = min(free(str(device)) / 2 / each, CHUNKS)
    size = CHUNK
    while 2 * size <= most and size < rows:
        size *= 2
    return size


def free(device: str) -> float:
    """Free bytes on a device; on a GPU including memory that torch has reserved but does not use."""
    if torch.device(device).type == "cuda":
        own = torch.device(device)
        unused = torch.cuda.memory_reserved(own) - torch.cuda.memory_allocated(own)
        return float(torch.cuda.mem_get_info(own)[0] + unused)
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    limits = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not limits and hasattr(os, "sysconf"):
        limits = [float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")]
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdecimal():
        limits.append(float(limit.read_text()) - float(used.read_text()))
    return min(limits, default=float("inf"))


def require_room(
    columns: int, embedding: int, depth: int, heads: int, categories: int, rows: int, row_attention: str, device: str
) -> bool:
    """Raise MemoryError if training does not fit; return whether activation checkpointing is needed."""
    whole, thrifty = needed(columns, embedding, depth, heads, categories, rows, row_attention, device)
    available = free(device)
    if thrifty > available:
        linear = "" if row_attention == "induced" else '; row_attention="induced" needs less memory for many rows'
        raise MemoryError(
            f"training on {rows:,} rows and {columns} columns (including the target; width {columns * embedding:,} at "
            f"embedding={embedding}) would take about {thrifty / 1e9:,.0f} GB, and {available / 1e9:,.0f} GB are free. "
            f"Halving the embedding quarters the weights{linear}"
        )
    return whole > available / 2
