"""Measurements of one step, from tensors on their devices to one list per metric, in a single transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_backend, get_world_size

from keyquery.instruments.monitor.reading import METRICS
from keyquery.instruments.monitor.statistics import ENTROPY, LARGEST, QUERIES, SINK, SMALLEST, UNIFORM

SUMS = ("entropy_sum", "sink_sum", "uniform_sum", "queries")
MEANS = ("symmetric", "skew", "popularity", "position")  # shares of a whole: their largest would not add up to 1
Measured = Mapping[str, Tensor]  # by metric, one value per head


def merged(forwards: Sequence[Measured]) -> dict[str, Tensor]:
    """Measurements of several forwards of one step: sums are added, of shares the mean is taken, else the largest.

    The smallest logit is held negated, so that this holds for it, too.
    """
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(key for part in forwards for key in part):
        parts = [part[name] for part in forwards if name in part]
        stack = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
        if name != "statistics":
            found[name] = stack[0] if len(parts) == 1 else stack.mean(0) if name in MEANS else stack.amax(0)
            continue
        found["largest"], found["smallest"] = stack[:, LARGEST].amax(0), (-stack[:, SMALLEST]).amax(0)
        sums = stack[:, ENTROPY:].sum(0)
        for metric, row in zip(SUMS, (ENTROPY, SINK, UNIFORM, QUERIES), strict=True):
            found[metric] = sums[row - ENTROPY]
    return found


class Packed:
    """The measurements of all layers as one tensor on its way to the CPU; with `shared`, those of all processes.

    >>> packed = Packed({"attention": {"largest": torch.ones(2), "queries": torch.ones(2)}})
    >>> packed.columns()["largest"].tolist()
    [1.0, 1.0]
    """

    def __init__(self, layers: Mapping[str, Measured], shared: bool = False) -> None:
        self.heads = [(name, len(next(iter(values.values())))) for name, values in layers.items()]
        self.metrics = list(dict.fromkeys(metric for values in layers.values() for metric in values))
        device = next(iter(next(iter(layers.values())).values())).device
        lines = []
        for metric in self.metrics:
            parts = [
                values[metric].to(device, torch.float64)
                if metric in values
                else torch.full((count,), math.nan, dtype=torch.float64, device=device)
                for (_, count), values in zip(self.heads, layers.values(), strict=True)
            ]
            lines.append(torch.cat(parts))
        table = torch.stack(lines)
        self._table = _reduced(table, self.metrics) if shared else table
        self._event: Any = None
        if self._table.is_cuda:
            self._table = self._table.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def columns(self) -> dict[str, np.ndarray]:
        """One array per metric, over all heads; waits until the transfer is done."""
        if self._event is not None:
            self._event.synchronize()
        found = dict(zip(self.metrics, self._table.numpy(), strict=True))
        if "smallest" in found:
            found["smallest"] = -found["smallest"]
        if "entropy_sum" in found:
            sums = [found.pop(metric) for metric in SUMS]
            queries = np.maximum(sums[3], 1.0)
            found |= {"entropy": sums[0] / queries, "sink": sums[1] / queries}
            found["relative_entropy"] = sums[0] / np.maximum(sums[2], 1e-9)
        finite = np.isfinite(found["largest"]) & np.isfinite(found.get("smallest", found["largest"]))
        return {name: column for name, column in found.items() if name in METRICS} | {"finite": finite.astype(float)}


def _reduced(table: Tensor, metrics: Sequence[str]) -> Tensor:
    """Over all processes: sums, means of shares, maxima of the other lines."""
    home = table.device
    table = table if get_backend() == "nccl" else table.cpu()
    shares = torch.tensor([metric in MEANS for metric in metrics], device=table.device)
    added = shares | torch.tensor([metric in SUMS for metric in metrics], device=table.device)
    for mask, how in ((added, ReduceOp.SUM), (~added, ReduceOp.MAX)):
        lines = table[mask].contiguous()
        all_reduce(lines, how)
        table[mask] = lines
    table[shares] /= get_world_size()
    return table.to(home)


def plain(column: np.ndarray) -> list[float | None]:
    """Numbers as JSON holds them: 7 digits, None where not finite.

    >>> plain(np.array([1 / 3, np.nan]))
    [0.3333333, None]
    """
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in column.tolist()]
