"""What `causes` and `discover` share: settings of a search, and what their readings say of graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyquery.learn.discovery.independence import Test
from keyquery.learn.discovery.pag import Edge
from keyquery.learn.discovery.search import Found, fci, icd
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.extras import optional

METHODS = ("icd", "fci")


@dataclass(frozen=True)
class Settings:
    """A validated method of search with its options."""

    method: str
    alpha: float
    rounds: int | None
    selection: bool

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_number("alpha", self.alpha)
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        check_count("rounds", self.rounds, optional=True)
        if self.rounds is not None and self.method != "icd":
            raise ValueError('rounds is only for method="icd", whose graph is valid after every round, not "fci"')

    def search(self, test: Test, **options: Any) -> Found:
        """The graph by this method; further options are those of `icd`."""
        if self.method == "fci":
            return fci(test, selection=self.selection, **options)
        return icd(test, self.rounds, selection=self.selection, **options)


def counts_of(test: Test, result: Found) -> dict[str, Any]:
    """The effort of a search, as readings store it."""
    by_size = [test.by_size[size] for size in range(max(test.by_size, default=-1) + 1)]
    return {"tests": test.tests, "tests_by_size": by_size, "rounds": result.rounds, "done": result.done}


def edges_of(rows: Iterable[Sequence[Any]]) -> list[Edge]:
    """Edges as stored in JSON, as tuples."""
    return [(i, j, at_i, at_j) for i, j, at_i, at_j in rows]


def networkx_of(nodes: Mapping[int, Hashable], edges: Iterable[Edge], extra: Mapping[tuple[int, int], Any]) -> Any:
    """A networkx.Graph over the names of the nodes; an edge has `marks`, {node: mark at it}, and its `extra`."""
    graph = optional("networkx", "networkx()").Graph()
    graph.add_nodes_from(nodes.values())
    for i, j, at_i, at_j in edges:
        graph.add_edge(nodes[i], nodes[j], marks={nodes[i]: at_i, nodes[j]: at_j}, **extra.get((i, j), {}))
    return graph
