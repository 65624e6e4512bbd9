"""What a record holds of a head's structure, at a slower rhythm: effective ranks, and shares of its score variance."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyquery.checkpoints import Layer
from keyquery.forms.measures import entropy_rank
from keyquery.forms.shares import Visible, shares
from keyquery.instruments.monitor.bound import product_core
from keyquery.instruments.monitor.interception import Seen

SHARES = ("symmetric", "skew", "popularity", "position")
LONGEST = 256  # tokens over which shares are computed: offsets cost their square
_WORKER: list[ThreadPoolExecutor] = []


@torch.no_grad()
def part_shares(layers: Mapping[str, Layer], seen: Mapping[str, Seen]) -> dict[str, dict[str, Tensor]]:
    """Shares of every head's score variance on a sample of its inputs, by module.

    They are those of `kq.look(pairs="independent")`: in closed form, for independent tokens. Layers alike are computed
    as one, to save kernel launches.
    """
    groups: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        tokens = seen[name].tokens
        if tokens is None or len(tokens) < 2 or not layer.on_data or not layer.by_offset:
            continue
        if tokens.shape[-1] == layer.weights.query.shape[-1]:
            groups.setdefault(_likeness(layer, seen[name]), []).append(name)
    results: dict[str, dict[str, Tensor]] = {}
    for names in groups.values():
        moments = [_moments(layers[name], seen[name]) for name in names]
        first = layers[names[0]]
        visible = Visible(min(seen[names[0]].length, LONGEST), first.causal, first.window)
        mean, covariance = (torch.cat(each) for each in zip(*moments, strict=True))
        parts = shares(mean, covariance, first.scale, visible, first.rope)
        counts = [len(mean) for mean, _ in moments]
        split = {part: parts[part].split(counts) for part in SHARES if part in parts}
        results |= {name: {part: values[at] for part, values in split.items()} for at, name in enumerate(names)}
    return results


def _likeness(layer: Layer, seen: Seen) -> Any:
    rope, weights, turned = layer.rope, layer.weights, None
    if rope is not None:
        given = None if rope.frequencies is None else tuple(rope.frequencies.tolist())
        turned = rope.dims, rope.base, rope.interleaved, rope.factor, given
    return turned, weights.query.shape[2], layer.scale, layer.causal, layer.window, seen.length, weights.query.device


def _moments(layer: Layer, seen: Seen) -> tuple[Tensor, Tensor]:
    """Mean and covariance of [q; k] of every head."""
    assert seen.tokens is not None
    query, key = layer.project(seen.tokens.double())
    joint = torch.cat((query, key.expand(query.shape)), -1).flatten(0, 1)
    mean = joint.mean(1)
    centred = joint - mean.unsqueeze(1)
    return mean, centred.mT @ centred / joint.shape[1]


class Ranks:
    """Effective ranks of every head, by module. Of weights on a GPU they are computed on the CPU beside the training:
    batched eigenvalue solvers run matrix by matrix on a GPU.

    >>> layer = kq.read(kq.Attention(8, heads=2))[0]
    >>> [round(float(rank), 2) <= 4 for rank in Ranks({"attention": layer}).result()["attention"]]
    [True, True]
    """

    @torch.no_grad()
    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._future: Future[dict[str, np.ndarray]] | None = None
        self._cores: list[tuple[list[str], Tensor]] = []  # names of layers alike, and their cores, (layers, …, r, r)
        groups: dict[Any, list[str]] = {}
        for name, layer in layers.items():
            query, key = layer.weights.query, layer.weights.key
            groups.setdefault((query.shape, key.shape, query.device), []).append(name)
        for names in groups.values():  # as one, to save kernel launches
            query = torch.stack([layers[name].weights.query for name in names]).double()
            key = torch.stack([layers[name].weights.key for name in names]).double()
            self._cores.append((names, product_core(query, key)))
        if any(core.is_cuda for _, core in self._cores):
            self._cores = [(names, core.to("cpu", non_blocking=True)) for names, core in self._cores]
            copied = torch.cuda.Event()
            copied.record()
            if not _WORKER:
                _WORKER.append(ThreadPoolExecutor(1, "keyquery-ranks"))
            self._future = _WORKER[0].submit(self._computed, copied)

    @property
    def done(self) -> bool:
        """Whether `result` need not be waited for."""
        return self._future is None or self._future.done()

    def result(self) -> dict[str, np.ndarray]:
        """The ranks, by module."""
        return self._computed() if self._future is None else self._future.result()

    @torch.no_grad()
    def _computed(self, copied: Any = None) -> dict[str, np.ndarray]:
        if copied is not None:
            copied.synchronize()
        ranks: dict[str, np.ndarray] = {}
        for names, cores in self._cores:
            values = torch.linalg.eigvalsh(cores.nan_to_num()).clamp(min=0).sqrt()
            rank = entropy_rank(values, values.sum(-1) == 0)
            rank = rank.masked_fill(~cores.isfinite().all(-1).all(-1), torch.nan)
            ranks |= zip(names, rank.flatten(1).numpy(), strict=True)
        return ranks
