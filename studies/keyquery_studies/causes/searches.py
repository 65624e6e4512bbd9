"""Which masked tokens change a prediction: sets found along the causal graph, compared with other token orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.learn.causes.causes import causes
from keyquery.learn.causes.explain import explain
from keyquery.listening import attention_maps
from keyquery_studies.causes.fill_in_model import BLANK, PADDING, BlankModel, unseen

ORDERS = ("causes", "attention", "gradient", "place", "random")
SEARCHES = ("sets", "prefix")
NODES = 30  # tokens that receive most attention
LARGEST = 3  # of the sets
CALLS = 500  # model queries after which a set search gives up
TRUTH = 2  # the largest sets that are all tried
AHEAD = 32  # sets per batch of model queries
BEST = 10  # top candidates that are tracked
TARGET = 0  # the masked token


@dataclass(eq=False)
class Patient:
    """A model and one sequence: its predictions with some tokens masked, queried once per set."""

    model: BlankModel
    ids: Int[Tensor, " n"]
    known: dict[frozenset[int], Int[Tensor, " best"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.best(())

    def best(self, hidden: Iterable[int]) -> Int[Tensor, " best"]:
        """The most likely candidates, best first."""
        self.ask([frozenset(hidden)])
        return self.known[frozenset(hidden)]

    def changed(self, hidden: Iterable[int], target: int = TARGET) -> bool:
        """Whether the top prediction changes."""
        return bool(self.best(hidden)[0] != self.before[0])

    @torch.no_grad()
    def ask(self, sets: Iterable[frozenset[int]]) -> None:
        """Predict for all sets in one batch."""
        new = [tokens for tokens in sets if tokens not in self.known]
        for some in (new[at : at + 256] for at in range(0, len(new), 256)):
            ids = self.ids.repeat(len(some), 1)
            for row, tokens in zip(ids, some, strict=True):
                row[list(tokens)] = BLANK
            logits = unseen(self.model(ids).float(), self.ids.expand(len(some), -1))
            best = logits.topk(min(BEST, logits.shape[1])).indices.cpu()
            self.known |= dict(zip(some, best, strict=True))


@dataclass(frozen=True)
class Found:
    """A set whose masking changes the prediction, or None, and the number of model queries."""

    hidden: tuple[int, ...] | None
    calls: int


def explained(model: BlankModel, ids: Int[Tensor, " n"], seed: int) -> dict[str, Any]:
    """One sequence by every order and search: size of the set, calls, and what comes in place of the prediction, the
    place it had before and the share of the ten best choices that stay.

    `smallest` is the size of the smallest sets there are among the nodes, where it is at most two.
    """
    patient = Patient(model, ids[ids != PADDING])
    maps = attention_maps(model, {"ids": patient.ids.unsqueeze(0)})[-1][0]
    attended = maps[:, TARGET].mean(0)
    able = torch.arange(1, len(patient.ids), device=ids.device)
    nodes = able[attended[able].argsort(descending=True, stable=True)][:NODES].tolist()
    smallest = _smallest(patient, nodes)
    gradient = sensitivity(model, patient.ids, int(patient.before[0]))
    generator = torch.Generator().manual_seed(seed)
    orders = {
        "attention": nodes,
        "gradient": sorted(nodes, key=lambda place: -float(gradient[place])),
        "place": sorted(nodes),  # what a graph leaves open, `explain` asks in this order, too
        "random": [nodes[at] for at in torch.randperm(len(nodes), generator=generator)],
    }
    graph = causes(maps, nodes=[TARGET, *nodes], samples=model.width)
    explanation = explain(graph, TARGET, patient.changed, largest=LARGEST, calls=CALLS, every=False)
    hit = tuple(explanation.sets[0]) if explanation.sets else None
    rows = {"causes sets": _row(patient, Found(hit, explanation.calls))}
    rows["causes prefix"] = _row(patient, first(prefixes(explanation.pool), patient))
    for name, order in orders.items():
        rows[f"{name} sets"] = _row(patient, first(subsets(order), patient, CALLS))
        rows[f"{name} prefix"] = _row(patient, first(prefixes(order), patient))
    sizes = {"nodes": len(nodes), "pool": len(explanation.pool), "edges": len(graph.edges), "tests": graph.tests}
    return {"smallest": smallest, **sizes, "found": rows}


def subsets(order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All sets, by size, then by the order of their members."""
    for size in range(1, LARGEST + 1):
        for places in sorted(combinations(range(len(order)), size), key=lambda some: (sum(some), some)):
            yield tuple(order[place] for place in places)


def prefixes(order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The first token, the first two, and so on."""
    return (tuple(order[:size]) for size in range(1, len(order) + 1))


def first(sets: Iterable[tuple[int, ...]], patient: Patient, most: int | None = None) -> Found:
    """The first set whose hiding changes the prediction, and its number, which is how often the model must be asked.

    In fact it is asked of some at a time, which is faster.
    """
    calls, rest = 0, islice(sets, most)
    while some := list(islice(rest, AHEAD)):
        patient.ask(map(frozenset, some))
        hit = next((at for at, tokens in enumerate(some) if patient.changed(tokens)), None)
        if hit is not None:
            return Found(some[hit], calls + hit + 1)
        calls += len(some)
    return Found(None, calls)


def sensitivity(model: BlankModel, ids: Int[Tensor, " n"], choice: int) -> Float[Tensor, " n"]:
    """Gradient × input: Σ_d x_d ∂logit/∂x_d of each token for one candidate."""
    vectors = model.tokens(ids.unsqueeze(0)).detach().requires_grad_()
    logit = model.filled(vectors, torch.ones_like(ids).bool().unsqueeze(0))[0, choice]
    (gradient,) = torch.autograd.grad(logit, vectors)
    return (vectors * gradient).detach()[0].sum(-1)


def _smallest(patient: Patient, nodes: Sequence[int]) -> int | None:
    for size in range(1, TRUTH + 1):
        sets = [frozenset(some) for some in combinations(nodes, size)]
        patient.ask(sets)
        if any(map(patient.changed, sets)):
            return size
    return None


def _row(patient: Patient, hit: Found) -> list[Any]:
    """Size and calls; the place that the new prediction had before, and the share of the ten best that are still so."""
    if hit.hidden is None:
        return [None, hit.calls, None, None]
    after = patient.best(hit.hidden)
    was = (patient.before == after[0]).nonzero()
    rank = int(was[0, 0]) + 1 if len(was) else None  # None: it was not among the top ten
    kept = torch.isin(after, patient.before).double().mean()
    return [len(hit.hidden), hit.calls, rank, round(float(kept), 3)]
