"""Time per training step: primal, primal+, fused and eager softmax, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from keyquery.learn.layers import regularizer
from keyquery.learn.training.optimisers import make_optimiser
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import result_name
from keyquery_studies.primal.arena.model import ATTENTIONS, EAGER, Classifier
from keyquery_studies.primal.arena.tasks import TASKS

TIMED = (*ATTENTIONS, EAGER)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of whole training steps of a task's shape: forward, backward, update, in bfloat16 on a GPU.

    Models this small may be bound by kernel launches: `busy_ms` is the time a step keeps the GPU busy, the sum of its
    kernels' times. Models are timed in turn, `repeats` times, each for `steps` steps, so that a slow machine affects
    all alike. Tokens are random; for tasks with padding, lengths are uniform from a quarter of the maximum up to it.
    """

    task: str
    where: str  # the device name: times on different devices are not comparable
    repeats: int = 7
    steps: int = 10
    batch: int | None = None  # None: as published
    length: int | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.task, tuple(TASKS))
        for name in ("repeats", "steps"):
            check_count(name, getattr(self, name))

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name(("speed", self.task), asdict(self))

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """`rows`, one per attention: ms per step (median, min, max), peak memory, and the speed-up over fused."""
        steps: dict[str, Callable[[], None]] = {}
        peaks: dict[str, int | None] = {}
        for attention in TIMED:
            try:
                steps[attention] = self._step(attention, device)
                peaks[attention] = _peak(steps[attention], device)
            except torch.OutOfMemoryError:
                steps.pop(attention, None)
                torch.cuda.empty_cache()  # for the next models
        times: dict[str, list[float]] = {attention: [] for attention in steps}
        for _ in range(self.repeats):
            for attention, step in steps.items():
                times[attention].append(_milliseconds(step, self.steps, device))
        rows = [self._row(attention, times, peaks) for attention in TIMED]
        for row in rows:
            row["busy_ms"] = _busy(steps[row["attention"]], self.steps, device) if row["ms"] is not None else None
        return {**asdict(self), "rows": rows, "device": device_name(device)}

    def _row(self, attention: str, times: dict[str, list[float]], peaks: dict[str, int | None]) -> dict[str, Any]:
        row: dict[str, Any] = {"attention": attention}
        if attention not in times:
            return {**row, "ms": None, "note": "does not fit into memory"}
        own, fused = times[attention], times["general"]
        row |= {"ms": median(own), "ms_low": min(own), "ms_high": max(own), "peak_bytes": peaks[attention]}
        ratios = [b / a for a, b in zip(own, fused, strict=True)]  # within one repeat, so that a slow one affects both
        row |= {"faster": median(ratios), "faster_low": min(ratios), "faster_high": max(ratios)}
        if EAGER in times:
            row["faster_than_eager"] = median([b / a for a, b in zip(own, times[EAGER], strict=True)])
        return {**row, "published_faster": TASKS[self.task].faster if attention == "primal" else None}

    def _step(self, attention: str, device: str) -> Callable[[], None]:
        task = TASKS[self.task]
        batch, length = self.batch or task.batch, self.length or task.length
        torch.manual_seed(0)
        tokens = torch.randint(1, task.vocabulary, (batch, length), dtype=torch.uint8).to(device)
        labels = torch.randint(task.classes, (batch,)).to(device)
        mask = None
        if task.padded:
            lengths = torch.randint(max(length // 4, 1), length + 1, (batch, 1)).to(device)
            mask = torch.arange(length, device=device) < lengths
        rank, eta = task.settings.get(attention, (None, None))
        primal = None if rank is None else {"rank": rank, "eta": eta}
        model = Classifier(attention, task.vocabulary, length, task.classes, primal).to(device)
        optimiser = make_optimiser("adamw", model, 1e-4, 0.0)

        def step() -> None:
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
                loss = cross_entropy(model(tokens, mask).float(), labels) + regularizer(model)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

        return step


def _peak(step: Callable[[], None], device: str) -> int | None:
    """Peak memory of the first three steps, beyond what was allocated before; None on a CPU."""
    if not device.startswith("cuda"):
        for _ in range(3):
            step()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _busy(step: Callable[[], None], times: int, device: str) -> float | None:
    """GPU-busy milliseconds per step, by the profiler; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    # User-annotated ranges, such as those of optimisers, contain kernels that are counted already.
    kernels = [e for e in profiler.key_averages() if not e.is_user_annotation and not e.key.startswith("Optimizer.")]
    return sum(kernel.self_device_time_total for kernel in kernels) / 1e3 / times or None


def _milliseconds(step: Callable[[], None], times: int, device: str) -> float:
    """Mean milliseconds per step; on a GPU by CUDA events."""
    if not device.startswith("cuda"):
        begin = perf_counter()
        for _ in range(times):
            step()
        return (perf_counter() - begin) * 1e3 / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()  # so that timing does not start on an idle device
    start.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) / times)
