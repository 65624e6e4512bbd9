"""`explain`: the smallest sets of tokens that a prediction depends on, found along the causal graph of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from keyquery.learn.causes.causes import Causes
from keyquery.learn.discovery.pag import Pag, closed_sets, depths, members
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count

# Whether the prediction at the target changes when these positions are masked.
Tester = Callable[[tuple[int, ...], int], bool]


@dataclass(frozen=True, kw_only=True)
class Explanation(Reading, kind="explanation"):
    """The smallest sets of tokens whose masking changes the prediction at the target."""

    units: ClassVar[Mapping[str, str]] = {"calls": "model queries", "sets": "positions of tokens"}

    target: int  # position whose prediction is explained
    sets: Sequence[Sequence[int]]
    calls: int
    pool: Sequence[int]  # candidates, nearest first: all nodes on a path of possible dependence to the target
    largest: int  # size of the largest set that was tried
    done: bool  # every set up to that size was tried
    tokens: Sequence[str] = ()  # of the sequence
    exhaustive: bool = False  # every subset, not only path-closed ones, in files of earlier versions

    def records(self) -> list[dict[str, Any]]:
        """One row per set."""
        rows = []
        for positions in self.sets:
            text = " ".join(self.tokens[position] for position in positions) if self.tokens else ""
            row = {"target": self.target, "size": len(positions), "positions": " ".join(map(str, positions))}
            rows.append({**row, "tokens": text})
        return rows


def explain(
    graph: Causes,
    target: int,
    tester: Tester | None = None,
    *,
    among: Iterable[int] | None = None,
    largest: int = 4,
    every: bool = True,
    calls: int | None = None,
) -> Explanation:
    """Find the smallest sets of tokens whose masking changes the prediction at `target`.

    Sets of one token are tried first, then of two, up to `largest`. Within a size, sets nearest to the target in its
    PDS-tree go first, and each token of a set is connected to the target by a path through the set. With several
    heads, every graph is used, and no set is tried twice.

    Parameters
    ----------
    graph
        A `Causes` from `kq.causes`.
    target
        Position of the prediction; must be a node of the graph.
    tester
        Masking oracle: `tester(positions, target)` returns whether masking these positions changes the prediction.
        Default: none, and only `.pool` is computed.
    among
        Positions from which sets are drawn; under causal attention never those after the target. Default: all nodes.
    largest
        Largest set size. Default: 4.
    every
        Find all sets of the smallest size, not only the first. Default: True.
    calls
        Maximum number of model queries. Default: unlimited.

    Returns
    -------
    Explanation
        The sets, the number of model queries, and the pool of candidates.

    Examples
    --------
    >>> graph = kq.causes(torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]]))
    >>> explanation = kq.explain(graph, 2, lambda masked, target: 0 in masked)
    >>> explanation.sets, explanation.calls, explanation.pool
    ([[0]], 2, [0, 1])

    See Also
    --------
    causes : The causal graph of the attention.
    """
    check_count("largest", largest)
    check_count("calls", calls, optional=True)
    if not isinstance(graph, Causes):
        raise TypeError(f"graph must be a Causes (from kq.causes), got {type(graph).__name__}")
    check_count("target", target, least=0, most=len(graph.tokens) - 1)
    if target not in graph.nodes:
        listed = ", ".join(map(str, graph.nodes))
        raise ValueError(f"target must be a node of the graph, got {target}; nodes: {listed}")
    target = int(target)
    later = range(target, len(graph.tokens)) if graph.causal else (target,)
    candidates = set(graph.nodes if among is None else among).difference(later)
    graphs = [graph.pag(row["head"]) for row in graph.graphs]
    trees = [{node: d for node, d in depths(pag, target).items() if node in candidates} for pag in graphs]
    near = {node: min(tree[node] for tree in trees if node in tree) for node in set().union(*trees)}
    by_size = _by_size(graphs, trees, target, largest)
    hits, tried, done = _test_sets(by_size, tester, target, calls, every) if tester is not None else ([], 0, True)
    return Explanation(
        target=target,
        sets=hits,
        calls=tried,
        pool=sorted(near, key=lambda node: (near[node], node)),
        largest=largest,
        done=done,
        tokens=graph.tokens,
        provenance=provenance(tensors=dict(graph.provenance.get("tensors", {}))),
    )


def _test_sets(
    by_size: Iterable[Sequence[int]], tester: Tester, target: int, most: int | None, every: bool
) -> tuple[list[list[int]], int, bool]:
    """Hits of the smallest size, the number of sets tried, and whether the search was complete."""
    hits: list[list[int]] = []
    tried = 0
    for sets in by_size:
        for mask in sets:
            if tried == most:
                return hits, tried, False
            tried += 1
            if _as_bool(tester(members(mask), target)):
                hits.append(list(members(mask)))
                if not every:
                    return hits, tried, False
        if hits:
            break
    return hits, tried, True


def _as_bool(answer: Any) -> bool:
    """A tester's answer as a bool. Numbers are rejected: any size of change but 0 would count as True."""
    value = answer.item() if isinstance(answer, (Tensor, np.ndarray)) and math.prod(answer.shape) == 1 else answer
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"tester must return True or False, got {answer!r:.60}")
    return bool(value)


def _by_size(
    graphs: Sequence[Pag], trees: Sequence[Mapping[int, int]], target: int, largest: int
) -> Iterator[Sequence[int]]:
    """Path-closed sets of all graphs by size, then by the summed depth of their members in the tree."""
    walks = [
        closed_sets(mask, target, sum(1 << node for node in tree), largest)
        for mask, tree in zip(graphs, trees, strict=True)
    ]
    for _ in range(largest):
        costs: dict[int, int] = {}
        for walk, tree in zip(walks, trees, strict=True):
            for mask in next(walk, ()):
                cost = sum(tree[node] for node in members(mask))
                costs[mask] = min(cost, costs.get(mask, cost))
        if not costs:
            return
        yield sorted(costs, key=lambda mask: (costs[mask], members(mask)))
