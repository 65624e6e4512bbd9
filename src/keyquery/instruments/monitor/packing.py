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
from keyquery.instruments.monitor.statistics import merge_statistics

STATISTICS = ("largest", "smallest", "entropy_sum", "sink_sum", "uniform_sum", "queries", "entry")  # rows of each head
SUMS = STATISTICS[2:6]
MEANS = ("symmetric", "skew", "popularity", "position")  # shares of a whole: their largest would not add up to 1
Measured = Mapping[str, Tensor]  # by metric, one value per head


def largest_norms(norms: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """The largest of all norms of a module, by module; tensors alike are reduced as one, to save kernel launches."""
    groups: dict[Any, list[tuple[str, Tensor]]] = {}
    for module, parts in norms.items():
        for part in parts:
            groups.setdefault((part.shape, part.dtype, part.device), []).append((module, part))
    found: dict[str, Tensor] = {}
    for alike in groups.values():
        largest = torch.stack([part for _, part in alike]).flatten(1).amax(1)
        for (module, _), value in zip(alike, largest, strict=True):
            found[module] = torch.maximum(found[module], value.to(found[module])) if module in found else value
    return found


def merge_forwards(layers: Mapping[str, Sequence[Measured]]) -> dict[str, dict[str, Tensor]]:
    """Measurements of all forwards of one step, by module: the mean of shares, the largest of other metrics."""
    found: dict[str, dict[str, Tensor]] = {}
    for module, forwards in layers.items():
        found[module] = dict(forwards[0]) if len(forwards) == 1 else _merged(forwards)
    groups: dict[Any, list[str]] = {}
    for module, values in found.items():
        groups.setdefault((values["statistics"].shape, values["statistics"].device), []).append(module)
    for modules in groups.values():  # layers alike as one, to save kernel launches
        joined = merge_statistics(torch.stack([found[module]["statistics"] for module in modules]))
        for module, statistics in zip(modules, joined, strict=True):
            found[module]["statistics"] = statistics
    return found


def _merged(forwards: Sequence[Measured]) -> dict[str, Tensor]:
    found = {}
    for name in dict.fromkeys(key for part in forwards for key in part):
        parts = [part[name] for part in forwards if name in part]
        if name == "statistics":
            found[name] = torch.cat(parts)
        else:
            stack = torch.stack(parts)
            found[name] = stack.mean(0) if name in MEANS else stack.amax(0)
    return found


class Packed:
    """The measurements of all layers as one tensor on its way to the CPU; with `shared`, those of all processes."""

    def __init__(
        self,
        layers: Mapping[str, Measured],
        scales: Mapping[str, float],
        dtypes: Mapping[str, torch.dtype],
        shared: bool = False,
    ) -> None:
        self.heads = [(name, values["statistics"].shape[1]) for name, values in layers.items()]
        self._scale = np.concatenate([np.full(count, scales[name]) for name, count in self.heads])
        self._eps = np.concatenate([np.full(count, torch.finfo(dtypes[name]).eps) for name, count in self.heads])
        device = next(iter(layers.values()))["statistics"].device
        metrics = list(dict.fromkeys(metric for values in layers.values() for metric in values))
        metrics.remove("statistics")
        rows: dict[torch.dtype, list[Tensor]] = {}  # those of one dtype are joined at once, to save kernel launches
        named: dict[torch.dtype, list[str]] = {}
        for metric in metrics:
            parts = [
                values[metric].to(device) if metric in values else torch.full((count,), math.nan, device=device)
                for (_, count), values in zip(self.heads, layers.values(), strict=True)
            ]
            widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
            rows.setdefault(widest, []).extend(parts)
            named.setdefault(widest, []).append(metric)
        first = torch.cat([values["statistics"].to(device) for values in layers.values()], 1)
        tables = [torch.cat(parts).view(-1, first.shape[1]) for parts in rows.values()]
        table = torch.cat([each.double() for each in (first, *tables)])
        self.metrics = [*STATISTICS, *metrics]  # in the order of the file
        self._lines = [*STATISTICS, *(metric for names in named.values() for metric in names)]
        self._table = _reduced(table, self._lines) if shared else table
        self._event: Any = None
        if self._table.is_cuda:
            self._table = self._table.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def columns(self) -> dict[str, np.ndarray]:
        """One array per metric, over all heads; waits until the transfer is done."""
        if self._event is not None:
            self._event.synchronize()
        lines = dict(zip(self._lines, self._table.numpy(), strict=True))
        found = {metric: lines[metric] for metric in self.metrics}
        largest, smallest = found["largest"], found["smallest"]
        queries = np.maximum(found["queries"], 1.0)
        found["entropy"], found["sink"] = found["entropy_sum"] / queries, found["sink_sum"] / queries
        found["relative_entropy"] = found["entropy_sum"] / np.maximum(found["uniform_sum"], 1e-9)
        found["unscaled"] = np.maximum(np.abs(largest), np.abs(smallest)) / self._scale
        if "bound" in found:
            # A bound below the logits would be one of other inputs than the layer's own: it is not shown.
            wrong = largest > found["bound"] * (1 + 16 * self._eps) + 1e-6
            found["bound"] = np.where(wrong, np.nan, found["bound"])
        finite = np.isfinite(largest) & np.isfinite(smallest)
        return {name: column for name, column in found.items() if name in METRICS} | {"finite": finite.astype(float)}


def _reduced(table: Tensor, metrics: Sequence[str]) -> Tensor:
    """Over all processes: sums, means of shares, the smallest logit, maxima of the other lines."""
    home = table.device
    table = table if get_backend() == "nccl" else table.cpu()
    shares = torch.tensor([metric in MEANS for metric in metrics], device=table.device)
    added = shares | torch.tensor([metric in SUMS for metric in metrics], device=table.device)
    least = torch.tensor([metric == "smallest" for metric in metrics], device=table.device)
    for mask, how in ((added, ReduceOp.SUM), (least, ReduceOp.MIN), (~(added | least), ReduceOp.MAX)):
        lines = table[mask].contiguous()
        all_reduce(lines, how)
        table[mask] = lines
    table[shares] /= get_world_size()
    return table.to(home)


def plain(column: np.ndarray) -> list[float | None]:
    """Numbers as JSON holds them: 7 digits, None where not finite."""
    finite = np.isfinite(column)
    safe = np.where(finite & (column != 0), column, 1.0)
    digits = 6 - np.floor(np.log10(np.abs(safe))).astype(int)
    up, down = 10.0 ** np.clip(digits, 0, 300), 10.0 ** np.clip(-digits, 0, 300)
    rounded = np.where(finite & (column != 0), np.rint(safe * up / down) * down / up, column)
    values = rounded.tolist()
    return values if finite.all() else [value if known else None for value, known in zip(values, finite, strict=True)]
