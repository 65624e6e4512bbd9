"""Cost of a function call: seconds and memory."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")


class Cost(NamedTuple):
    """CPU seconds, or those on the clock where a GPU works, and by how much memory rose at most; None: not known."""

    seconds: float
    megabytes: float | None


def costing(work: Callable[[], Result], device: str = "cpu") -> tuple[Result, Cost]:
    """The result of a function call, and its cost.

    Memory is that of the GPU where one works, and else that of the process, which only Linux tells. What was imported
    or set up before is not counted: do the work once on something small first.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), perf_counter()
        result = work()
        torch.cuda.synchronize()
        return result, Cost(perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**20)
    held = _reset()
    start = process_time()
    result = work()
    seconds = process_time() - start
    return result, Cost(seconds, None if held is None else max(_told("VmHWM") - held, 0.0))


def _reset() -> float | None:
    """Current memory in megabytes, after releasing free memory and resetting the peak."""
    gc.collect()
    try:
        assert sys.platform == "linux"
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _told("VmRSS")
    except (OSError, AttributeError, AssertionError):
        return None


def _told(name: str) -> float:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) / 1024 if match else 0.0
