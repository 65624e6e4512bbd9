"""`causes`: the causal graph over tokens that a head's attention implies, allowing for hidden causes.

Attention Z = AV is read as a structural equation model X = GX + U with (I − G)⁻¹ = D⁻¹A and noise of unit covariance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from keyquery.learn.causes.attention import Mapped, chosen, mapped
from keyquery.learn.discovery.independence import PartialCorrelation, correlation_of
from keyquery.learn.discovery.knowledge import knowledge_of
from keyquery.learn.discovery.pag import Edge, Pag
from keyquery.learn.discovery.search import check_search, search
from keyquery.listening.inputs.word_pieces import Words
from keyquery.reading import Reading, digest, provenance
from keyquery.support.checks import check_count, check_number
from keyquery.support.progress import Progress, bar, silent

SAMPLES = 768  # hidden size of the models in the publication
MANY = 100  # nodes; searches of more show their progress


@dataclass(frozen=True, kw_only=True)
class Causes(Reading, kind="causes"):
    """A partial ancestral graph per head, over some of the tokens.

    A graph has its layer, head, edges (i, j, mark at i, mark at j) of positions, number of tests, also by size of the
    conditioning set, rounds, and whether the search was completed.
    """

    units: ClassVar[Mapping[str, str]] = {
        "edges": "positions i < j, the mark at i, the mark at j",
        "samples": "effective sample size of the tests; a convention, not a count",
        "tests": "tests of independence",
    }

    model: Mapping[str, Any]  # name and facts of the model
    tokens: Sequence[str]  # of the attention map
    nodes: Sequence[int]  # positions in the graphs
    graphs: Sequence[Mapping[str, Any]]  # one per head
    method: str  # "icd" or "fci"
    alpha: float  # significance level of the tests
    samples: float
    explanation: Mapping[str, Any] | None = None  # an Explanation, if a target was given
    causal: bool = False  # the search assumed that no token causes an earlier one

    @property
    def edges(self) -> list[Edge]:
        """Edges (i, j, mark at i, mark at j), i < j, of the only graph, or of the consensus of several heads."""
        if len(self.graphs) == 1:
            return self.edges_of(0)
        return [(row["i"], row["j"], row["mark_i"], row["mark_j"]) for row in self.consensus()]

    @property
    def tests(self) -> int:
        """Number of independence tests, over all graphs."""
        return sum(graph["tests"] for graph in self.graphs)

    def edges_of(self, index: int) -> list[Edge]:
        """The edges of the graph at `index` among `graphs`."""
        return [(i, j, at_i, at_j) for i, j, at_i, at_j in self.graphs[index]["edges"]]

    def agreement(self) -> list[dict[str, Any]]:
        """Every edge of any head, with the number of heads that have it and the counts of marks at each end.

        The mark at an end is that of the majority, or a circle without one.
        """
        marks_of: dict[tuple[int, int], list[tuple[str, str]]] = {}
        for i, j, at_i, at_j in chain(*map(self.edges_of, range(len(self.graphs)))):
            marks_of.setdefault((i, j), []).append((at_i, at_j))
        rows = []
        for (i, j), marks in sorted(marks_of.items()):
            counts = [Counter(ends) for ends in zip(*marks, strict=True)]
            agreed = [next((m for m, n in count.items() if 2 * n > len(marks)), "circle") for count in counts]
            row = {"i": i, "j": j, "heads": len(marks), "mark_i": agreed[0], "mark_j": agreed[1]}
            rows.append({**row, "marks_i": dict(counts[0]), "marks_j": dict(counts[1])})
        return rows

    def consensus(self) -> list[dict[str, Any]]:
        """Edges that at least half of the heads have, as rows of `agreement`."""
        return [row for row in self.agreement() if 2 * row["heads"] >= len(self.graphs)]

    def pag(self, head: int | None = None) -> Pag:
        """The graph of a head, or that of `edges`, over all tokens."""
        return Pag(len(self.tokens), self.edges if head is None else self.edges_of(self.index_of(head)))

    def records(self) -> list[dict[str, Any]]:
        """One row per edge of each head."""
        rows = []
        for index, graph in enumerate(self.graphs):
            for i, j, at_i, at_j in self.edges_of(index):
                pair = {"i": i, "j": j, "token_i": self.tokens[i], "token_j": self.tokens[j]}
                rows.append({"layer": graph["layer"], "head": graph["head"], **pair, "mark_i": at_i, "mark_j": at_j})
        return rows

    def index_of(self, head: int) -> int:
        """Index of a head's graph in `graphs`."""
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
    selection: bool = False,
    causal: bool | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Causes:
    """Causal graph over tokens from the attention of each head (zero-shot causal discovery).

    C = D⁻¹AAᵀD⁻¹ with D = diag(A) is taken as the covariance of the tokens; partial correlations of C are tested by
    Fisher's z, and ICD or FCI builds a partial ancestral graph.

    Parameters
    ----------
    attention
        A tensor (n, n) or (heads, n, n) whose rows sum to 1; or any live model that `kq.listen` sees, with `text`
        or `inputs`; or the path of a model, with `text`.
    nodes
        Positions to include, or how many of those that receive most attention. The rest, and special tokens, are
        hidden causes. Default: all words.
    alpha
        Significance level of the tests. Default: 0.01.
    samples
        Effective sample size of the tests, a convention. Default: the model's hidden size; 768 for a tensor.
    method
        "icd" or "fci". Default: "icd".
    text, tokenizer
        A text to run the model on, and its tokenizer. Default: none, and the tokenizer stored with the model.
    inputs
        A mapping of input tensors, instead of `text`. Default: none.
    layer, head
        Layer and head(s) of the model. Default: the last layer, all heads.
    tokens
        Names of the tokens. Default: those of the text, else positions.
    merge
        Merge word pieces into words. Default: True.
    target
        A position that is always among the nodes. Default: none.
    rounds
        Stop ICD after so many rounds; the graph is then valid for smaller conditioning sets. Default: all.
    selection
        Allow for selection bias. Default: False.
    causal
        No token causes an earlier one, and no test conditions on tokens later than both of a pair. True requires
        causal attention. Default: True if no head of the layer attends to later tokens and `selection` is False.
    name
        Name of the model. Default: that of its class or file.
    progress
        Wraps iterables in progress bars. Default: a bar for more than 100 nodes.

    Returns
    -------
    Causes
        One partial ancestral graph per head.

    Examples
    --------
    >>> reading = kq.causes(torch.tensor([[1, 0, 0], [0, 1, 0], [0.3, 0.3, 0.4]]))
    >>> reading.edges, reading.tests
    ([(0, 2, 'circle', 'arrow'), (1, 2, 'circle', 'arrow')], 5)

    See Also
    --------
    explain : The smallest sets of tokens that a prediction depends on.
    """
    check_search(method, alpha, rounds)
    if samples is not None:
        check_number("samples", samples)
        if samples < 4:
            raise ValueError(f"samples must be at least 4, got {samples}")
    source = mapped(attention, text, inputs, layer, head, tokens, merge, tokenizer, name)
    effective = float(samples if samples is not None else source.width or SAMPLES)
    ordered, positions = _ordered(source, causal, selection), _nodes(nodes, source, target)
    watch = progress or (bar if len(positions) > MANY else silent)
    knowledge, several = knowledge_of(len(positions), positions if ordered else None), len(source.heads) > 1

    def graph_of(number: int, attended: Float[np.ndarray, "n n"]) -> dict[str, Any]:
        def watched(items: Any, what: str, total: int) -> Any:
            return watch(items, f"head {number}, {what}" if several else what, total)

        test = PartialCorrelation(correlation_of(attended[positions]), effective, alpha)
        result = search(test, method, rounds, selection=selection, knowledge=knowledge, progress=watched)
        edges = [(positions[i], positions[j], at_i, at_j) for i, j, at_i, at_j in result.graph.edges()]
        return {"layer": source.layer, "head": number, "edges": edges, **result.effort}

    origin = "given" if samples is not None else "hidden size" if source.width else "768, as published"
    facts = {"samples": origin, "merged": source.merged, "rounds": rounds, "selection": selection}
    return Causes(
        model=source.model,
        tokens=source.tokens,
        nodes=positions,
        graphs=[graph_of(*pair) for pair in zip(source.heads, source.maps, strict=True)],
        method=method,
        alpha=alpha,
        samples=effective,
        causal=ordered,
        provenance=provenance(tensors={"attention": digest(source.maps)}, **facts),
    )


def _ordered(source: Mapped, causal: bool | None, selection: bool) -> bool:
    """Whether the search uses the order of the tokens."""
    if causal not in (None, True, False):
        raise TypeError(f"causal must be True, False or None, got {causal!r:.40}")
    if causal and selection:
        raise ValueError("causal=True and selection exclude each other: what selects may come after all tokens")
    if causal and not source.causal:
        raise ValueError("causal=True, but the attention looks ahead: tokens attend to later ones")
    return source.causal and causal is not False and not selection


def _nodes(nodes: int | Iterable[int] | None, source: Mapped, target: int | None) -> list[int]:
    """Positions in order; for a number, the target and the tokens that receive most attention."""
    check_count("target", target, least=0, most=len(source.tokens) - 1, optional=True)
    words = [position for position, real in enumerate(source.real) if real]
    if nodes is None:
        return words
    if not isinstance(nodes, (int, np.integer)):
        return sorted(chosen("nodes", nodes, len(source.tokens)))
    check_count("nodes", nodes, most=len(words))
    received = np.mean(source.maps, axis=(0, 1))
    return sorted(sorted(words, key=lambda position: (position != target, -received[position]))[:nodes])
