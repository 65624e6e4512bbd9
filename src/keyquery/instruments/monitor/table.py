"""Measurements of one step, from tensors on their devices to one array per metric, in a single transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_backend, get_world_size

from keyquery.instruments.monitor.reading import METRICS
from keyquery.instruments.monitor.statistics import STATISTICS

SUMS = STATISTICS[2:6]
SHARES = ("symmetric", "skew", "popularity", "position")
MEANS = (*SHARES, "loss")  # over processes
Measured = Mapping[str, Tensor]  # by metric, one value per head


class Table:
    """The measurements of all layers as one tensor on its way to the CPU; with `shared`, those of all processes.

    `facts` are the scale of the scores and the dtype of queries and keys, by module.
    """

    def __init__(
        self,
        layers: Mapping[str, Measured],
        facts: Mapping[str, tuple[float, torch.dtype]],
        loss: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        self.heads = [(name, len(values["largest"])) for name, values in layers.items()]
        self._scale = np.concatenate([np.full(count, facts[name][0]) for name, count in self.heads])
        self._eps = np.concatenate([np.full(count, torch.finfo(facts[name][1]).eps) for name, count in self.heads])
        device = next(iter(layers.values()))["largest"].device
        self._metrics = list(dict.fromkeys(metric for values in layers.values() for metric in values))
        rows = [
            torch.cat(
                [
                    values[metric].to(device) if metric in values else torch.full((count,), math.nan, device=device)
                    for (_, count), values in zip(self.heads, layers.values(), strict=True)
                ]
            ).double()
            for metric in self._metrics
        ]
        if loss is not None:
            self._metrics.append("loss")
            rows.append(loss.to(device, torch.float64).expand(len(rows[0])))
        table = torch.stack(rows)
        self._table = (_reduced(table, self._metrics) if shared else table).to("cpu", non_blocking=True)
        self._event: Any = None
        if table.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def columns(self) -> dict[str, np.ndarray]:
        """One array per metric, over all heads; waits until the transfer is done."""
        if self._event is not None:
            self._event.synchronize()
        columns = dict(zip(self._metrics, self._table.numpy(), strict=True))
        largest, smallest = columns["largest"], columns["smallest"]
        queries = np.maximum(columns["queries"], 1.0)
        columns["entropy"], columns["sink"] = columns["entropy_sum"] / queries, columns["sink_sum"] / queries
        columns["relative_entropy"] = columns["entropy_sum"] / np.maximum(columns["uniform_sum"], 1e-9)
        columns["unscaled"] = np.maximum(np.abs(largest), np.abs(smallest)) / self._scale
        if "bound" in columns:
            # A bound below the logits would be one of other inputs than the layer's own: it is not shown.
            wrong = largest > columns["bound"] * (1 + 16 * self._eps) + 1e-6
            columns["bound"] = np.where(wrong, np.nan, columns["bound"])
        columns["finite"] = (np.isfinite(largest) & np.isfinite(smallest)).astype(float)
        return {name: columns[name] for name in (*METRICS, "loss") if name in columns}


def _reduced(table: Tensor, metrics: Sequence[str]) -> Tensor:
    """Over all processes: sums, means, the smallest logit, maxima of the other lines."""
    home = table.device
    table = table if get_backend() == "nccl" else table.cpu()
    means = torch.tensor([metric in MEANS for metric in metrics], device=table.device)
    added = means | torch.tensor([metric in SUMS for metric in metrics], device=table.device)
    least = torch.tensor([metric == "smallest" for metric in metrics], device=table.device)
    for mask, how in ((added, ReduceOp.SUM), (least, ReduceOp.MIN), (~(added | least), ReduceOp.MAX)):
        lines = table[mask].contiguous()
        all_reduce(lines, how)
        table[mask] = lines
    table[means] /= get_world_size()
    return table.to(home)


def plain(column: np.ndarray) -> list[float | None]:
    """Numbers as JSON holds them: 7 digits, None where not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in column.tolist()]
