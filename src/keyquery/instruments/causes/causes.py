"""`causes`: the causal graph that a head's attention implies over the tokens, with hidden causes allowed.

Attention Z = AV is read as a structural equation model X = GX + U, whose solution is X = (I − G)⁻¹U: (I − G)⁻¹ is D⁻¹A
with D = diag(A), and the noise is the identity, so that C = D⁻¹AAᵀD⁻¹ is the covariance of the tokens. Partial
correlations of C say which tokens are independent given which, and a search makes a graph of that.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from keyquery.capture.word_pieces import Words
from keyquery.instruments.causes.attention import Mapped, listed, mapped
from keyquery.instruments.causes.discovery import (
    Edge,
    Pag,
    PartialCorrelation,
    correlation_of,
    expected_seconds,
    fci,
    icd,
)
from keyquery.reading import Reading, digest, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.extras import optional
from keyquery.support.progress import Progress, bar, silent

METHODS = ("icd", "fci")
LONG = 60  # seconds from which on a search is warned of
SAMPLES = 768  # the hidden size of the models that the method was published with


@dataclass(frozen=True, kw_only=True)
class Causes(Reading, kind="causes"):
    """A partial ancestral graph for each head, over some of the tokens.

    `tokens` are all of the attention's; `nodes` the positions that are in the graphs, by which edges name them, too.
    A graph holds its layer, head, edges (i, j, mark at i, mark at j), tests, tests by the size of the set they
    conditioned on, rounds, and whether the search was done.
    """

    units: ClassVar[Mapping[str, str]] = {
        "edges": "positions i < j, the mark at i, the mark at j",
        "samples": "effective sample size of the tests; a convention, no count of anything",
        "tests": "tests of independence",
    }

    model: Mapping[str, Any]
    tokens: Sequence[str]
    nodes: Sequence[int]
    graphs: Sequence[Mapping[str, Any]]
    method: str
    alpha: float
    samples: float
    explanation: Mapping[str, Any] | None = None  # an Explanation, where a target was given
    causal: bool = False  # the search knew that no token is a cause of an earlier one

    @property
    def edges(self) -> list[Edge]:
        """Those of the one graph, or of the consensus of several heads: (i, j, mark at i, mark at j), i < j."""
        if len(self.graphs) == 1:
            return self.edges_of(0)
        return [(row["i"], row["j"], row["mark_i"], row["mark_j"]) for row in self.consensus()]

    @property
    def tests(self) -> int:
        """How many tests of independence all graphs took."""
        return sum(graph["tests"] for graph in self.graphs)

    def edges_of(self, index: int) -> list[Edge]:
        """The edges of the graph at `index` among `graphs`."""
        return [(i, j, at_i, at_j) for i, j, at_i, at_j in self.graphs[index]["edges"]]

    def agreement(self) -> list[dict[str, Any]]:
        """Every edge of any head: how many heads have it, and how many of those have which mark at which end.

        The mark of an end is the one that more than half of them agree on, else a circle.
        """
        seen: dict[tuple[int, int], list[tuple[str, str]]] = {}
        for index in range(len(self.graphs)):
            for i, j, at_i, at_j in self.edges_of(index):
                seen.setdefault((i, j), []).append((at_i, at_j))
        rows = []
        for (i, j), marks in sorted(seen.items()):
            counts = [Counter(ends) for ends in zip(*marks, strict=True)]
            agreed = [next((m for m, n in count.items() if 2 * n > len(marks)), "circle") for count in counts]
            row = {"i": i, "j": j, "heads": len(marks), "mark_i": agreed[0], "mark_j": agreed[1]}
            rows.append({**row, "marks_i": dict(counts[0]), "marks_j": dict(counts[1])})
        return rows

    def consensus(self, least: int | None = None) -> list[dict[str, Any]]:
        """The edges that at least so many heads have, as `agreement` tells them; half of the heads, unless given."""
        check_count("least", least, most=len(self.graphs), optional=True)
        wanted = -(-len(self.graphs) // 2) if least is None else least
        return [row for row in self.agreement() if row["heads"] >= wanted]

    def pag(self, head: int | None = None) -> Pag:
        """The graph of a head, or that of `edges`; its nodes are all tokens, those without an edge among them."""
        return Pag(len(self.tokens), self.edges if head is None else self.edges_of(self.index_of(head)))

    def networkx(self, head: int | None = None) -> Any:
        """The graph of a head, or that of `edges`, as a networkx.Graph of `nodes` (extra `causes`).

        Nodes have a `token`; an edge between i and j has `marks`, {i: mark at i, j: mark at j}; in a consensus also
        `heads`, how many have it.
        """
        graph = optional("networkx", "networkx()").Graph()
        graph.add_nodes_from((node, {"token": self.tokens[node]}) for node in self.nodes)
        heads = {(row["i"], row["j"]): {"heads": row["heads"]} for row in self.agreement()} if head is None else {}
        for i, j, at_i, at_j in self.edges if head is None else self.edges_of(self.index_of(head)):
            graph.add_edge(i, j, marks={i: at_i, j: at_j}, **heads.get((i, j), {}))
        return graph

    def records(self) -> list[dict[str, Any]]:
        """One row an edge of a head."""
        rows = []
        for index, graph in enumerate(self.graphs):
            for i, j, at_i, at_j in self.edges_of(index):
                place = {"layer": graph["layer"], "head": graph["head"], "i": i, "j": j}
                words = {"token_i": self.tokens[i], "token_j": self.tokens[j]}
                rows.append({**place, **words, "mark_i": at_i, "mark_j": at_j})
        return rows

    def index_of(self, head: int) -> int:
        """Where the graph of a head stands among `graphs`."""
        heads = [graph["head"] for graph in self.graphs]
        if head not in heads:
            raise ValueError(f"head must be one of {', '.join(map(str, heads))}, got {head!r}")
        return heads.index(head)


def causes(
    attention: Any,
    nodes: int | Iterable[int] | None = None,
    alpha: float = 0.01,
    samples: float | None = None,
    method: str = "icd",
    *,
    text: str | Words | None = None,
    inputs: Any = None,
    layer: int | None = None,
    head: int | Iterable[int] | None = None,
    tokens: Sequence[str] | None = None,
    merge: bool = True,
    tokenizer: Any = None,
    target: int | None = None,
    rounds: int | None = None,
    order_free: bool = True,
    selection: bool = False,
    tails: bool = True,
    causal: bool | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Causes:
    """A causal graph for each head out of its attention, zero-shot, as a Reading.

    `attention` is a tensor (n, n) or (heads, n, n) whose rows sum to 1; or a transformers model, `kq.Attention`, or
    anything built of it, with a `text` and its `tokenizer`, or with `inputs`, a mapping of what the model takes; or
    the path of a model, with a `text`. Models are run once, the attention is that of `layer` (the deepest unless
    given) and of `head` (all unless given); pieces of words `merge` into words. `nodes` are positions in that
    attention, or how many to take of those that receive most, all words unless given; the rest, and what a tokenizer
    adds, is left out, as hidden causes. Of so many, `target`, a position that is to be explained, is always one.

    `alpha` is the level of the tests, `samples` their effective sample size: the model's hidden size unless given, 768
    for a bare matrix, as published; a convention, not a sample size. `method` is "icd" or "fci"; after `rounds` rounds
    ICD's graph is valid for sets of fewer nodes than that. `order_free`: edges are deleted at the end of a round, and
    the order of tokens does not matter. `selection` allows for selection bias, `tails` looks for all tails.

    `causal`: no token is a cause of an earlier one, and no test conditions on tokens later than both of a pair. True
    requires attention that never looks ahead, False ignores the order. Default: True where no head of the layer
    attends to a later token, as in decoders; with `selection` False, since a later token may be behind the selection.

    A search that is expected to take longer than a minute is warned of; its `progress` is a bar then, unless given.

    >>> reading = kq.causes(torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]]))
    >>> reading.edges, reading.tests
    ([(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow')], 5)
    """
    _check(alpha, samples, method, rounds, causal, selection)
    source = mapped(attention, text, inputs, layer, head, tokens, merge, tokenizer, name)
    effective = float(samples if samples is not None else source.width or SAMPLES)
    ordered = _ordered(source, causal, selection)
    search = _Search(method, alpha, effective, rounds, order_free, selection, tails, ordered)
    return search.reading(source, _nodes(nodes, source, target), progress, samples is not None)


def _warned(test: PartialCorrelation, heads: int) -> bool:
    """Whether a search takes long, which is then warned of."""
    seconds = expected_seconds(test) * heads
    if seconds < LONG:
        return False
    time = f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.0f} hours"
    of = f"{test.count} nodes" + (f" of {heads} heads" if heads > 1 else "")
    warnings.warn(
        f"causes over {of} is expected to take {time} or more; nodes=100 takes the 100 tokens that receive most "
        "attention, head one head, rounds=1 stops early",
        stacklevel=4,
    )
    return True


def _named(progress: Progress, head: int, heads: int) -> Progress:
    """Progress that names the head, where there are several."""
    name = f"head {head}, " if heads > 1 else ""
    return lambda items, what, total: progress(items, f"{name}{what}", total)


@dataclass(frozen=True)
class _Search:
    """How a graph is searched for."""

    method: str
    alpha: float
    samples: float
    rounds: int | None
    order_free: bool
    selection: bool
    tails: bool
    causal: bool

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("rounds", "order_free", "selection", "tails")}

    def reading(self, source: Mapped, nodes: list[int], progress: Progress | None, given: bool) -> Causes:
        """The graphs of all heads; `given`: the samples are not those of the model."""
        several = len(source.heads)
        long = self.rounds != 1 and _warned(self.test(source.maps[0], nodes), several)
        watch = progress or (bar if long else silent)
        graphs = [
            {"layer": source.layer, "head": number, **self.of(found, nodes, _named(watch, number, several))}
            for number, found in zip(source.heads, source.maps, strict=True)
        ]
        origin = "given" if given else "hidden size" if source.width else "768, as published"
        tensors = {"attention": digest(source.maps)}
        return Causes(
            model=source.model,
            tokens=source.tokens,
            nodes=nodes,
            graphs=graphs,
            method=self.method,
            alpha=self.alpha,
            samples=self.samples,
            causal=self.causal,
            provenance=provenance(samples=origin, merged=source.merged, tensors=tensors, **self.options),
        )

    def test(self, attention: Float[ndarray, "n n"], nodes: list[int]) -> PartialCorrelation:
        return PartialCorrelation(correlation_of(attention[nodes]), self.samples, self.alpha)

    def of(self, attention: Float[ndarray, "n n"], nodes: list[int], progress: Progress) -> dict[str, Any]:
        """The graph of one head, as a reading holds it."""
        test = self.test(attention, nodes)
        options: dict[str, Any] = self.options
        rounds = options.pop("rounds")
        options["tiers"] = nodes if self.causal else None
        options["progress"] = progress
        found = fci(test, **options) if self.method == "fci" else icd(test, rounds, **options)
        edges = [(nodes[i], nodes[j], at_i, at_j) for i, j, at_i, at_j in found.graph.edges()]
        by_size = [test.by_size[size] for size in range(max(test.by_size, default=-1) + 1)]
        told = {"tests": test.tests, "tests_by_size": by_size, "rounds": found.rounds, "done": found.done}
        return {"edges": edges, **told}


def _check(
    alpha: float, samples: float | None, method: str, rounds: int | None, causal: bool | None, selection: bool
) -> None:
    check_number("alpha", alpha)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if samples is not None:
        check_number("samples", samples)
        if samples < 4:
            raise ValueError(f"samples must be at least 4, got {samples}")
    check_choice("method", method, METHODS)
    check_count("rounds", rounds, optional=True)
    if rounds is not None and method != "icd":
        raise ValueError(f'rounds is for method="icd", which is valid after any of them, not {method!r}')
    if causal not in (None, True, False):
        raise TypeError(f"causal must be True, False or None, got {causal!r:.40}")
    if causal and selection:
        raise ValueError("causal=True goes without selection: what selected the data may come later than all tokens")


def _ordered(source: Mapped, causal: bool | None, selection: bool) -> bool:
    """Whether the search is told the order of the tokens."""
    if causal and not source.causal:
        raise ValueError("causal=True, but the attention looks ahead: tokens attend to later ones")
    return source.causal and causal is not False and not selection


def _nodes(nodes: int | Iterable[int] | None, source: Mapped, target: int | None) -> list[int]:
    """Positions in order; of a number, the target and those that receive most attention."""
    count = len(source.tokens)
    check_count("target", target, least=0, most=count - 1, optional=True)
    if nodes is None:
        return [place for place in range(count) if source.real[place]]
    if isinstance(nodes, (int, np.integer)):
        able = [place for place in range(count) if source.real[place]]
        check_count("nodes", nodes)
        if nodes > len(able):
            raise ValueError(f"nodes asks for {nodes} tokens, but there are only {len(able)}")
        received = np.mean(source.maps, axis=(0, 1))
        return sorted(sorted(able, key=lambda place: (place != target, -received[place]))[:nodes])
    chosen = listed(nodes)
    if len(chosen) > count:
        raise ValueError(f"nodes names {len(chosen)} tokens, but there are only {count}")
    for place in chosen:
        check_count("a position in nodes", place, least=0, most=count - 1)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"nodes must name positions, each once, got {chosen}")
    return sorted(map(int, chosen))
