"""What the forwards and gradients of one step show of every attention module, until it is one array per metric."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, get_backend, get_world_size

from keyquery.instruments.monitor.bound import logit_bounds
from keyquery.instruments.monitor.layers import Layers
from keyquery.instruments.monitor.reading import METRICS
from keyquery.instruments.monitor.statistics import STATISTICS, call_statistics, merge_statistics
from keyquery.instruments.monitor.structure import SHARES, Shares, effective_ranks
from keyquery.listening.call import Call
from keyquery.listening.listen import add_listener
from keyquery.listening.parts.on_data import SEQUENCES
from keyquery.listening.tokens import Arguments, Run

TOKENS = 256  # of each of the sequences from which shares are computed
WEIGHTS = ("sigma", "bound", "input_norm", "query_gradient", "key_gradient", "effective_rank", *SHARES)
MEASURED = (*STATISTICS, *WEIGHTS, "loss")
SUMS, MEANS = STATISTICS[2:], (*SHARES, "loss")  # over processes; of others extremes


@dataclass
class Seen:
    """What was seen of one attention module."""

    dtype: torch.dtype
    scale: float | None  # of the scores; None if the model does not multiply q·k by a number
    statistics: list[Float[Tensor, "6 heads"]] = field(default_factory=list)  # per call
    norm: Tensor | None = None  # largest ‖x‖ of the tokens that enter the module
    sample: Sample | None = None  # of the last forward
    values: dict[str, Float[Tensor, " heads"]] = field(default_factory=dict)  # by metric

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.statistics[0].shape[-1]


@dataclass(frozen=True, eq=False)
class Sample:
    """The first sequences and tokens that enter a self-attention module, and their call."""

    inputs: Float[Tensor, "batch n d"]
    call: Call
    version: int  # of the inputs: they are not copied


class Step:
    """Listens to the forwards of one step; no exception reaches the model, the first is kept in `error`."""

    def __init__(self, structure: bool = False) -> None:
        self.seen: dict[str, Seen] = {}
        self.error: Exception | None = None
        self._shares = Shares() if structure else None
        self._run: Run | None = None

    def attach(self, model: nn.Module, changes: ExitStack) -> None:
        """Listen to the calls of a model; `changes` ends it."""
        self._run = add_listener(model, self._listen, changes, self._fail).run

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error

    def _listen(self, call: Call) -> None:
        device = call.query.device.type
        rounding = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        try:
            with torch.no_grad(), torch.autocast(device, enabled=False):
                self._add(call, rounding)
        except Exception as error:  # training goes on
            self._fail(error)

    def _add(self, call: Call, rounding: torch.dtype | None) -> None:
        seen = self.seen.setdefault(call.name, Seen(rounding or call.query.dtype, call.scale))
        if seen.statistics and seen.heads != call.heads:
            raise ValueError(f"{call.name or 'the model'} attends with different numbers of heads")
        seen.statistics.append(call_statistics(call, rounding))
        given = Arguments() if self._run is None else self._run.arguments.get(call.module, Arguments())
        for x, real in ((given.first, call.real_queries), (given.second if call.is_cross else None, call.real)):
            if x is None or x.ndim not in (2, 3):
                continue
            x = x.detach()
            if x.ndim == 3 and getattr(call.module, "batch_first", True) is False:
                x = x.transpose(0, 1)
            norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
            largest = (norms if real is None or real.shape != norms.shape else norms.where(real, 0.0)).amax()
            seen.norm = largest if seen.norm is None else torch.maximum(seen.norm, largest)
            if self._shares is not None and seen.sample is None and not call.is_cross:
                seen.sample = _sample(call, x)

    def read(self, layers: Layers | None) -> None:
        """After a forward: what the weights have to say of it."""
        for seen in self.seen.values():
            if seen.norm is not None:
                seen.values["input_norm"] = seen.norm.expand(seen.heads)
        if layers is None:
            return
        now = {name: layer for name, layer in layers.now(self.seen).items() if layer.heads == self.seen[name].heads}
        norms = {name: math.nan if (norm := self.seen[name].norm) is None else norm for name in now}
        for name, (sigma, bound) in logit_bounds(now, norms, layers.heads).items():
            seen = self.seen[name]
            seen.values |= {"sigma": sigma, "bound": bound}
            seen.scale = now[name].scale if seen.scale is None else seen.scale
        if self._shares is None:
            return
        unranked = {name: layer for name, layer in now.items() if "effective_rank" not in self.seen[name].values}
        for name, ranks in effective_ranks(unranked).items():
            self.seen[name].values["effective_rank"] = ranks
        for name, layer in now.items():
            sample, self.seen[name].sample = self.seen[name].sample, None
            if sample is not None and sample.inputs._version == sample.version:  # else they were changed in place
                self._shares.add(name, layers.heads, layer, sample.inputs, sample.call)

    def read_gradients(self, layers: Layers) -> None:
        """‖∂L/∂W_q‖ and ‖∂L/∂W_k‖ of every head."""
        for name, (query, key) in layers.gradient_norms(self.seen).items():
            if len(query) == self.seen[name].heads:
                self.seen[name].values |= {"query_gradient": query, "key_gradient": key}

    def heads(self) -> list[dict[str, int | str]]:
        """Layer, number and name of every head."""
        return [
            {"layer": layer, "head": head, "name": f"{name}.{head}".lstrip(".")}
            for layer, (name, seen) in enumerate(self.seen.items())
            for head in range(seen.heads)
        ]

    def columns(self, loss: Tensor | None = None, shared: bool = False) -> dict[str, np.ndarray]:
        """One array per metric, over all heads; with `shared`, of all processes together."""
        shares = {} if self._shares is None else self._shares.result()
        tables = []
        for name, seen in self.seen.items():
            values = dict(zip(STATISTICS, merge_statistics(seen.statistics), strict=True))
            values |= seen.values | shares.get(name, {})
            if loss is not None:
                values["loss"] = loss.expand(seen.heads)
            missing = torch.full((seen.heads,), math.nan)
            device = next(iter(self.seen.values())).statistics[0].device
            tables.append(torch.stack([values.get(metric, missing).to(device).double() for metric in MEASURED]))
        table = torch.cat(tables, 1)
        columns = dict(zip(MEASURED, (_reduced(table) if shared else table).cpu().numpy(), strict=True))
        if loss is None:
            del columns["loss"]
        counts = [seen.heads for seen in self.seen.values()]
        eps = np.repeat([torch.finfo(seen.dtype).eps for seen in self.seen.values()], counts)
        scale = np.repeat([seen.scale or 1.0 for seen in self.seen.values()], counts)
        return _derived(columns, eps, scale)


def _derived(columns: dict[str, np.ndarray], eps: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    """Means of what was summed, and what follows from several metrics."""
    largest, smallest = columns["largest"], columns["smallest"]
    queries = np.maximum(columns["queries"], 1.0)
    columns["entropy"], columns["sink"] = columns["entropy_sum"] / queries, columns["sink_sum"] / queries
    columns["relative_entropy"] = columns["entropy_sum"] / np.maximum(columns["uniform_sum"], 1e-9)
    columns["unscaled"] = np.maximum(np.abs(largest), np.abs(smallest)) / scale
    # A bound below the logits would be one of other inputs than the layer's own: it is not shown.
    wrong = largest > columns["bound"] * (1 + 16 * eps) + 1e-6
    columns["bound"] = np.where(wrong, np.nan, columns["bound"])
    columns["finite"] = (np.isfinite(largest) & np.isfinite(smallest)).astype(float)
    return {name: columns[name] for name in (*METRICS, "loss") if name in columns}


def _sample(call: Call, x: Tensor) -> Sample | None:
    """The first sequences and tokens of a call; None if its inputs are not its tokens."""
    batch, n, m = len(call.query), call.query.shape[-2], call.key.shape[-2]
    if n != m or x.shape[:2] != (batch, n):
        return None
    sequences, tokens = slice(SEQUENCES), slice(TOKENS)
    part = replace(call.detached(), value=None).part(sequences, tokens, keys=tokens)
    return Sample(x[sequences, tokens], part, x._version)


def everywhere(complete: bool) -> bool:
    """Whether every process has a record: one that failed must not leave the others waiting."""
    flag = torch.tensor(float(complete), device="cuda" if get_backend() == "nccl" else "cpu")
    all_reduce(flag, ReduceOp.MIN)
    return bool(flag)


def _reduced(table: Tensor) -> Tensor:
    """The table over all processes."""
    table = table if get_backend() == "nccl" else table.cpu()
    for metric, row in zip(MEASURED, table.unbind(), strict=True):
        added = metric in SUMS or metric in MEANS
        all_reduce(row, ReduceOp.SUM if added else ReduceOp.MIN if metric == "smallest" else ReduceOp.MAX)
        if metric in MEANS:
            row /= get_world_size()
    return table
