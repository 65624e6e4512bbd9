"""Attribution of an in-context prediction to training rows, columns and parts of the attention scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.learn.in_context.network import ContextLayer, ContextNetwork
from keyquery.learn.layers.datapoints import Memory
from keyquery.reading import Reading
from keyquery.support.progress import Progress

PARTS = ("symmetric", "skew", "popularity")  # the others are the same for every key, and softmax ignores them


@dataclass(frozen=True, kw_only=True, repr=False)
class InContextExplanation(Reading, kind="in-context explanation"):
    """Attribution of one prediction: every column of the row, the parts of the scores, and the training rows.

    Rows come with the most attended first; their attention sums to 1.
    """

    units: ClassVar[Mapping[str, str]] = {
        "attention": "mean over layers, heads and members",
        "symmetric": "mean of this part of the attention score, relative to its mean over training rows",
        "skew": "the same",
        "popularity": "the same",
        "effect": "drop of the log-odds of the class without it, in nats",
    }

    predicted: Any  # the predicted class
    probability: float  # of that class
    parts: Mapping[str, float]  # effects
    columns: Sequence[Mapping[str, Any]]  # name, value and effect of each column
    rows: Sequence[Mapping[str, Any]]  # training rows with attention and score parts, most attended first

    def __repr__(self) -> str:
        size = f"{len(self.columns)} columns, {len(self.rows)} rows"
        return f"InContextExplanation(predicted {self.predicted!r}, {size})"

    def records(self) -> list[dict[str, Any]]:
        """One row per column, then per part of the scores, then per training row."""
        blank = dict.fromkeys(("value", "attention", *PARTS))
        records = [
            {"part": "column", "name": row["column"], **blank, "value": row["value"], "effect": row["effect"]}
            for row in self.columns
        ]
        records += [{"part": "score", "name": name, **blank, "effect": effect} for name, effect in self.parts.items()]
        shown = ("attention", *PARTS, "effect")
        return records + [
            {"part": "row", "name": str(row["row"]), "value": row["target"], **{name: row[name] for name in shown}}
            for row in self.rows
        ]


@dataclass(frozen=True)
class Question:
    """The table of every member: labelled rows (context), and rows to classify."""

    network: ContextNetwork
    context: Float[Tensor, "members n columns"]
    labels: Int[Tensor, "members n"]
    rows: Float[Tensor, "members m columns"]
    orders: Int[Tensor, "members classes"]  # output of each class
    temperature: float

    def split(self, size: int) -> list[Question]:
        """Groups of `size` members."""
        parts = ("context", "labels", "rows", "orders")
        groups = zip(*(getattr(self, name).split(size) for name in parts), strict=True)
        return [replace(self, **dict(zip(parts, group, strict=True))) for group in groups]

    def memories(self) -> list[Memory]:
        """Keys and values of the context in every layer."""
        return self.network.memories(self.context, self.labels)

    def logits(self, rows: Tensor, memories: list[Memory]) -> Float[Tensor, "members m classes"]:
        """Logits in the order of the classes, divided by the temperature."""
        return self.ordered(self.network(rows, memories))

    def ordered(self, outputs: Tensor) -> Float[Tensor, "members m classes"]:
        """Outputs of the network in the order of the classes, divided by the temperature."""
        index = self.orders.unsqueeze(1).expand(-1, outputs.shape[1], -1)
        return outputs.gather(2, index) / self.temperature


class Effects(NamedTuple):
    """The result of `attribute`; rows by their index in the training set."""

    predicted: int
    probability: float
    attention: np.ndarray
    scores: dict[str, np.ndarray]
    parts: dict[str, float]
    columns: np.ndarray
    rows: dict[int, float]


@torch.no_grad()
def attribute(question: Question, rows: int, group: int, progress: Progress) -> Effects:
    """Effects on the first of `question.rows`; the others are that row without one of its columns.

    `rows` of the most attended training rows are removed. Members are computed `group` at a time.
    """
    pieces = question.split(group)
    traces = [_traced(piece) for piece in progress(pieces, "members", len(pieces))]
    weights = [len(piece.rows) for piece in pieces]
    logits, parts, looked = (_mean(list(results), weights) for results in zip(*traces, strict=True))
    chosen = int(logits[0].argmax())
    odds = _odds(logits, chosen)
    attention = looked[0].numpy()
    tried = np.argsort(-attention, kind="stable")[:rows].tolist() if len(attention) > 1 else []
    removed = {}
    for place in progress(tried, "removing rows", len(tried)):
        without = _mean([_without(piece, place) for piece in pieces], weights)
        removed[place] = float(odds[0] - _odds(without, chosen)[0])
    return Effects(
        predicted=chosen,
        probability=float(logits[0].softmax(-1)[chosen]),
        attention=attention,
        scores=dict(zip(PARTS, looked[1:].numpy(), strict=True)),
        parts=dict(zip(PARTS, (odds[0] - _odds(parts, chosen)).tolist(), strict=True)),
        columns=(odds[0] - odds[1:]).numpy(),
        rows=removed,
    )


def _traced(piece: Question) -> tuple[Tensor, Tensor, Tensor]:
    """Means over members: logits of all rows, those without each part, and attention and parts of the scores."""
    network, memories = piece.network, piece.memories()
    context = network.labelled(piece.context, piece.labels)
    x = network.encoder(piece.rows[:, :1])
    ablated, looked = [x] * len(PARTS), []
    for layer, memory in zip(network.layers, memories, strict=True):
        assert isinstance(layer, ContextLayer)
        parts = score_parts(layer, x, context, memory)
        attention = torch.stack(parts).sum(0).softmax(-1)
        looked.append(torch.stack([part[:, :, 0].mean((0, 1)) for part in (attention, *parts)]))
        ablated = [_ablated(layer, state, context, memory, place) for place, state in enumerate(ablated)]
        x, context = layer(x, memory), layer(context, memory)
    without = torch.cat([piece.ordered(network.decoder(state)) for state in ablated], 1)
    return piece.logits(piece.rows, memories).mean(0), without.mean(0), torch.stack(looked).mean(0)


def score_parts(layer: ContextLayer, x: Tensor, context: Tensor, memory: Memory) -> list[Float[Tensor, "b heads n m"]]:
    """The parts of the scores of x with the context, as in `keyquery.forms.parts`, with means over the context."""
    attention = layer.attention
    queries, keys = attention.queries(context), memory.key
    query_mean, key_mean = queries.mean(-2, keepdim=True), keys.mean(-2, keepdim=True)
    query, key = attention.queries(x) - query_mean, attention.memory(x).key - key_mean
    pairs, swapped = query @ (keys - key_mean).mT, key @ (queries - query_mean).mT
    popularity = (query_mean @ (keys - key_mean).mT).expand_as(pairs)
    return [part * attention.scale for part in ((pairs + swapped) / 2, (pairs - swapped) / 2, popularity)]


def _ablated(layer: ContextLayer, x: Tensor, context: Tensor, memory: Memory, ablated: int) -> Tensor:
    """The layer with one part removed from the scores of x."""
    parts = score_parts(layer, x, context, memory)
    scores = torch.stack([part for place, part in enumerate(parts) if place != ablated]).sum(0)
    mixed = (scores.softmax(-1) @ memory.value).transpose(1, 2).flatten(2)
    return layer.mixed(x, layer.attention.output(mixed))


def _without(piece: Question, place: int) -> Float[Tensor, "1 classes"]:
    """Mean logits of the first row without one row of the context."""
    kept = [other for other in range(piece.context.shape[1]) if other != place]
    fewer = replace(piece, context=piece.context[:, kept], labels=piece.labels[:, kept])
    return fewer.logits(fewer.rows[:, :1], fewer.memories()).mean(0)


def _mean(values: list[Tensor], weights: list[int]) -> Tensor:
    """Weighted mean in float64, on the CPU."""
    weighted = [value.double().cpu() * weight for value, weight in zip(values, weights, strict=True)]
    return torch.stack(weighted).sum(0) / sum(weights)


def _odds(logits: Tensor, chosen: int) -> Float[Tensor, " n"]:
    """Log-odds of a class."""
    others = torch.cat((logits[:, :chosen], logits[:, chosen + 1 :]), 1)
    return logits[:, chosen] - others.logsumexp(1)
