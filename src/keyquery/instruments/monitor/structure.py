"""What a record holds of a head's structure, at a slower rhythm: effective ranks, and shares of its score variance."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.positions.relative import VECTORS
from keyquery.forms.measures import entropy_rank
from keyquery.forms.parts import PARTS
from keyquery.forms.rope import Rope
from keyquery.instruments.monitor.bound import product_core
from keyquery.instruments.monitor.observation import Seen
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.on_data import SEQUENCES
from keyquery.listening.parts.pairs import ScoredPairs, scored_pairs
from keyquery.listening.parts.shares import jackknife
from keyquery.listening.parts.variance import FOLDS, POSITION, ROLES, at_once, products_of, stacked_parts

SHARES = ("symmetric", "skew", "popularity", "position")
MAX_SEQUENCES = 4  # whose parts are computed where means are over all positions
CELLS = 2**22  # scores of one part in memory at a time, about: a training run leaves little room
_WORKER: list[ThreadPoolExecutor] = []


class Scores(NamedTuple):
    """What enters the scores of some heads; two versions of the means, or one."""

    query: Float[Tensor, "sequences heads n r"]
    key: Float[Tensor, "sequences heads n r"]
    mean_query: Float[Tensor, "versions #sequences heads #n r"]
    mean_key: Float[Tensor, "versions #sequences heads #n r"]
    visible: Bool[Tensor, "sequences heads n n"]
    bias: Float[Tensor, "1 heads #n #n"]


@torch.no_grad()
def part_shares(heads: Heads, layers: Mapping[str, Layer], seen: Mapping[str, Seen]) -> dict[str, dict[str, Tensor]]:
    """Shares of every head's score variance over the pairs of tokens that its model scores, by module.

    They are those of `kq.look` on the first sequences of the batch; means are by position if these are enough. Layers
    alike are computed as one, to save kernel launches.
    """
    names: dict[Any, list[tuple[str, int]]] = {}
    waiting: dict[Any, list[Scores]] = {}
    products: dict[Any, list[Tensor]] = {}
    for name, layer in layers.items():
        sample = seen[name].sample
        if sample is None or not layer.on_data or layer.axial is not None or layer.position in VECTORS:
            continue
        if sample.inputs.shape[-1] != layer.weights.query.shape[-1] or sample.inputs._version != sample.version:
            continue
        scores = _scores(heads, layer, scored_pairs(layer, sample.inputs.float(), sample.call))
        alike = _likeness(layer.rope, scores)
        names.setdefault(alike, []).append((name, layer.heads))
        waiting.setdefault(alike, []).append(scores)
        if sum(scores.visible.numel() for scores in waiting[alike]) >= CELLS:
            products.setdefault(alike, []).append(_products(waiting.pop(alike), layer.rope))
    for alike, rest in waiting.items():
        products.setdefault(alike, []).append(_products(rest, layers[names[alike][0][0]].rope))
    results: dict[str, dict[str, Tensor]] = {}
    for alike, parts in products.items():
        results |= _by_layer(torch.cat(parts, 1).cpu(), names[alike])
    return results


def _likeness(rope: Rope | None, scores: Scores) -> Any:
    """Equal for layers whose heads may be computed together."""
    turned: Any = None
    if rope is not None:
        given = None if rope.frequencies is None else tuple(rope.frequencies.tolist())
        turned = rope.dims, rope.base, rope.interleaved, rope.factor, given
    return turned, scores.query.device, *((x.shape[:-3], x.shape[-2:]) for x in scores)


def _by_layer(
    products: Float64[Tensor, "sequences heads parts parts"], layers: list[tuple[str, int]]
) -> dict[str, dict[str, Tensor]]:
    squares, total = products.diagonal(dim1=-2, dim2=-1), products.sum((-2, -1))
    results: dict[str, dict[str, Tensor]] = {name: {} for name, _ in layers}
    for part in SHARES:
        shares = jackknife(squares, total, itemgetter((..., PARTS.index(part)))).value
        for (name, _), share in zip(layers, shares.split([count for _, count in layers]), strict=True):
            results[name][part] = share
    return results


def _products(layers: list[Scores], rope: Rope | None) -> Float64[Tensor, "sequences heads parts parts"]:
    """Products of the parts of layers alike, over all sequences at once."""
    joined = Scores(*(torch.cat(same, -3) for same in zip(*layers, strict=True)))
    shape, n = joined.query.shape, joined.query.shape[-2]
    query, key = joined.query.flatten(0, 1), joined.key.flatten(0, 1)
    means = [
        [mean.expand(shape).flatten(0, 1) for mean in both]
        for both in zip(joined.mean_query, joined.mean_key, strict=True)
    ]
    visible, slots = joined.visible.flatten(0, 1), torch.arange(n, device=query.device)  # differences alone count
    bias = joined.bias.expand(len(joined.query), *joined.bias.shape[1:]).flatten(0, 1)
    out = []
    for first in range(0, len(query), many := at_once(n * n, query)):
        part = slice(first, first + many)
        versions = []
        for mean_query, mean_key in means:
            parts, _ = stacked_parts(query[part], key[part], mean_query[part], mean_key[part], slots, rope)
            parts[:, POSITION] += bias[part]
            versions.append(parts)
        other = versions[1] if len(versions) > 1 else versions[0].clone()
        out.append(products_of(versions[0], other, visible[part])[0])
    return torch.cat(out).unflatten(0, shape[:2])


def _scores(heads: Heads, layer: Layer, pairs: ScoredPairs) -> Scores:
    """What enters the scores of a layer: of every other sequence, with means of the rest, if there are enough."""
    size, count, n = len(pairs.query), pairs.query.shape[1], pairs.query.shape[-2]
    if size >= SEQUENCES:
        rows, visible, mean_query, mean_key = _by_position(pairs)
    else:
        rows, visible = slice(MAX_SEQUENCES), pairs.visible
        weight = pairs.real[:, None, :, None].double() / pairs.real.sum().clamp(min=1)
        mean_query, mean_key = (
            (side * weight).sum((0, 2)).to(side)[None, None, :, None] for side in (pairs.query, pairs.key)
        )
    slots = torch.arange(n, device=pairs.query.device)
    bias = heads.pair_bias(layer, slots, slots)
    bias = pairs.query.new_zeros(count, 1, 1) if bias is None else bias.to(pairs.query)
    seen = visible.expand(size, count, n, n)[rows]
    return Scores(pairs.query[rows], pairs.key[rows], mean_query, mean_key, seen, bias[None])


def _by_position(pairs: ScoredPairs) -> tuple[slice, Tensor, Tensor, Tensor]:
    """Means by position of every other sequence, in folds, for the rest, and the pairs for which they are known."""
    first, rows = slice(0, None, 2), slice(1, None, 2)
    positions, means = pairs.positions.expand(len(pairs.query), -1), PositionMeans(FOLDS)
    fold = torch.arange(len(pairs.query[first])) % FOLDS
    means.add(pairs.query[first], pairs.key[first], positions[first], pairs.real[first], fold)
    by_fold = [means.at(positions[rows], number) for number in range(FOLDS)]
    queries, keys = (torch.stack(side).to(pairs.query) for side in zip(*by_fold, strict=True))
    count = queries.shape[1]
    roles = torch.tensor([ROLES[row % len(ROLES)] for row in range(count)], device=queries.device).T
    row = torch.arange(count, device=queries.device)
    known = means.known[positions.clamp(max=len(means.known) - 1)] & (positions < len(means.known))
    visible = pairs.visible & known[:, None, None] & known[:, None, :, None]
    return rows, visible, queries[roles[0::2], row], keys[roles[1::2], row]


class Ranks:
    """Effective ranks of every head, by module. Of weights on a GPU they are computed on the CPU beside the training:
    batched eigenvalue solvers run matrix by matrix on a GPU.
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
