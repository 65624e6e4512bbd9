"""`explain`: the smallest sets of tokens that a prediction rests on, found along the causal graph of the attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from keyquery.instruments.causes.causes import Causes
from keyquery.instruments.causes.discovery import Pag, closed_sets, depths, members
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count

# Whether the prediction at the target changes when these positions are masked.
Tester = Callable[[tuple[int, ...], int], bool]


@dataclass(frozen=True, kw_only=True)
class Explanation(Reading, kind="explanation"):
    """The sets of one size, the smallest that was found, whose masking changes the prediction at the target.

    `pool` is what they were taken from, nearest first: all nodes that a path of possible dependence joins to the
    target. `calls` counts how often the model was asked; with `done` every set up to that size was.
    """

    units: ClassVar[Mapping[str, str]] = {"calls": "calls of the tester", "sets": "positions of tokens"}

    target: int
    sets: Sequence[Sequence[int]]
    calls: int
    pool: Sequence[int]
    largest: int
    exhaustive: bool
    done: bool
    tokens: Sequence[str] = ()

    def records(self) -> list[dict[str, Any]]:
        """One row a set."""
        words = [" ".join(self.tokens[place] for place in one) if self.tokens else "" for one in self.sets]
        return [
            {"target": self.target, "size": len(one), "positions": " ".join(map(str, one)), "tokens": said}
            for one, said in zip(self.sets, words, strict=True)
        ]


def explain(
    graph: Causes | Pag,
    target: int,
    tester: Tester | None = None,
    *,
    head: int | None = None,
    among: Iterable[int] | None = None,
    largest: int = 4,
    reach: int | None = None,
    exhaustive: bool = False,
    every: bool = True,
    calls: int | None = None,
) -> Explanation:
    """The smallest sets of tokens whose masking changes the prediction at `target`, and how many calls it took.

    `tester(positions, target)` says whether masking these positions changes it. Sets of one token are tried first,
    then of two, up to `largest`; those of one size that lie nearest to the target in its PDS-tree go first, and each
    token of a set is joined to the target by a path through the set. All sets of the first size that has any are
    found, or only the first of them, unless `every`. Of several heads every graph is used, and no set is tried twice;
    `head` names one. Sets are drawn from `among` if given, and never from tokens behind the target where the attention
    is causal: no prediction of a decoder rests on them. `reach` bounds the depth of
    the tree, `calls` how often the tester may be asked. `exhaustive` tries all sets of the graph's nodes, whatever its
    edges, to know the truth. Without a tester only the `pool` is told.

    >>> graph = kq.causes(torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]]))
    >>> found = kq.explain(graph, 2, lambda masked, target: 0 in masked)
    >>> found.sets, found.calls, found.pool
    ([[0]], 2, [0, 1])
    """
    check_count("largest", largest)
    check_count("reach", reach, optional=True)
    check_count("calls", calls, optional=True)
    graphs, nodes, tokens = _graphs(graph, head)
    check_count("target", target, least=0, most=len(tokens) - 1)
    if target not in nodes:
        raise ValueError(f"target must be a node of the graph, got {target}; nodes: {', '.join(map(str, nodes))}")
    if tester is not None and not callable(tester):
        raise TypeError(f"tester must be a function of positions and target, got {type(tester).__name__}")
    target = int(target)
    able = set(nodes if among is None else among) - {target} - _later(graph, target)
    trees = [{node: d for node, d in depths(one, target, reach).items() if node in able} for one in graphs]
    near = _nearest(trees)
    pool = [node for node in nodes if node in able] if exhaustive else sorted(near, key=lambda node: (near[node], node))
    by_size = _every(pool, largest) if exhaustive else _by_size(graphs, trees, target, largest)
    hits, tried, done = _asked(by_size, tester, target, calls, every) if tester is not None else ([], 0, True)
    return Explanation(
        target=target,
        sets=hits,
        calls=tried,
        pool=pool,
        largest=largest,
        exhaustive=exhaustive,
        done=done,
        tokens=tokens if isinstance(graph, Causes) else [],
        provenance=provenance(head=head, reach=reach, tensors=_read(graph)),
    )


def _asked(
    by_size: Iterable[Sequence[int]], tester: Tester, target: int, most: int | None, every: bool
) -> tuple[list[list[int]], int, bool]:
    """The sets of the first size that has any, how many were tried, and whether none was left out for want of calls."""
    hits: list[list[int]] = []
    tried = 0
    for sets in by_size:
        for one in sets:
            if tried == most:
                return hits, tried, False
            tried += 1
            if _said(tester(members(one), target)):
                hits.append(list(members(one)))
                if not every:
                    return hits, tried, False
        if hits:
            break
    return hits, tried, True


def _said(answer: Any) -> bool:
    """A tester's answer. A number is refused: it would be a measure of the change, and any but 0 would mean yes."""
    told = answer.item() if isinstance(answer, (Tensor, np.ndarray)) and math.prod(answer.shape) == 1 else answer
    if not isinstance(told, (bool, np.bool_)):
        raise TypeError(f"tester must say True or False, got {answer!r:.60}")
    return bool(told)


def _read(graph: Any) -> dict[str, str]:
    """Digests of what the graph was made of, where it says so."""
    return dict(graph.provenance.get("tensors", {})) if isinstance(graph, Causes) else {}


def _graphs(graph: Causes | Pag, head: int | None) -> tuple[list[Pag], list[int], list[str]]:
    """The graphs to search, their nodes, and the tokens of the whole attention."""
    if isinstance(graph, Pag):
        if head is not None:
            raise ValueError("head is of a reading of several heads; this is one graph")
        return [graph], list(range(len(graph))), [""] * len(graph)
    if not isinstance(graph, Causes):
        raise TypeError(f"graph must be what kq.causes gives, or a Pag, got {type(graph).__name__}")
    heads = [one["head"] for one in graph.graphs] if head is None else [head]
    return [graph.pag(one) for one in heads], list(graph.nodes), list(graph.tokens)


def _later(graph: Causes | Pag, target: int) -> set[int]:
    """The target and the tokens behind it, where the attention is causal."""
    return set(range(target, len(graph.tokens))) if isinstance(graph, Causes) and graph.causal else set()


def _nearest(trees: Sequence[Mapping[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tree in trees:
        for node, depth in tree.items():
            found[node] = min(depth, found.get(node, depth))
    return found


def _by_size(
    graphs: Sequence[Pag], trees: Sequence[Mapping[int, int]], target: int, largest: int
) -> Iterator[Sequence[int]]:
    """The path-closed sets of all graphs, size by size, by the sum of their members' depths in the tree they are of."""
    walks = [
        closed_sets(one, target, sum(1 << node for node in tree), largest)
        for one, tree in zip(graphs, trees, strict=True)
    ]
    for _ in range(largest):
        costs: dict[int, int] = {}
        for walk, tree in zip(walks, trees, strict=True):
            for one in next(walk, ()):
                cost = sum(tree[node] for node in members(one))
                costs[one] = min(cost, costs.get(one, cost))
        if not costs:
            return
        yield sorted(costs, key=lambda one: (costs[one], members(one)))


def _every(pool: Sequence[int], largest: int) -> Iterator[Sequence[int]]:
    for size in range(1, min(largest, len(pool)) + 1):
        yield [sum(1 << node for node in some) for some in combinations(pool, size)]
