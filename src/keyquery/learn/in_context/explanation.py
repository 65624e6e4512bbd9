"""Attribution of an in-context prediction to training rows, columns and parts of the attention scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from keyquery.learn.in_context.network import ContextLayer, ContextNetwork
from keyquery.learn.layers.datapoints import Memory
from keyquery.learn.npt.explanation import Attribution, Effects, drops
from keyquery.learn.series.importance import log_odds
from keyquery.reading import Reading
from keyquery.support.progress import Progress

TEMPERATURE = 0.8  # by which logits are divided
PARTS = ("symmetric", "skew", "popularity")  # the others are the same for every key, and softmax ignores them


@dataclass(frozen=True, kw_only=True, repr=False)
class InContextExplanation(Attribution, Reading, kind="in-context explanation"):
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

    __repr__ = Attribution.__repr__


class Question(NamedTuple):
    """The table of every member: labelled rows (context), and rows to classify."""

    network: ContextNetwork
    context: Float[Tensor, "members n columns"]
    labels: Int[Tensor, "members n"]
    rows: Float[Tensor, "members m columns"]
    orders: Int[Tensor, "members classes"]  # output of each class

    def split(self, size: int) -> list[Question]:
        """Groups of `size` members."""
        network, *parts = self
        return [Question(network, *group) for group in zip(*(part.split(size) for part in parts), strict=True)]

    def memories(self) -> list[Memory]:
        """Keys and values of the context in every layer."""
        return self.network.memories(self.context, self.labels)

    def logits(self, rows: Tensor, memories: list[Memory]) -> Float[Tensor, "members m classes"]:
        """Logits in the order of the classes, divided by the temperature."""
        return self.ordered(self.network(rows, memories))

    def ordered(self, outputs: Tensor) -> Float[Tensor, "members m classes"]:
        """Outputs of the network in the order of the classes, divided by the temperature."""
        index = self.orders.unsqueeze(1).expand(-1, outputs.shape[1], -1)
        return outputs.gather(2, index) / TEMPERATURE


@torch.no_grad()
def attribute(
    question: Question, rows: int, group: int, progress: Progress
) -> tuple[Float64[Tensor, " classes"], dict[str, float], Effects]:
    """Logits of the first of `question.rows`, and effects; the other rows are that one without one of its columns."""
    pieces = question.split(group)
    weights = [len(piece.rows) for piece in pieces]
    traces = [_traced(piece) for piece in progress(pieces, "members", len(pieces))]
    logits, parts, looked = (_mean(results, weights) for results in zip(*traces, strict=True))
    odds = partial(log_odds, chosen=int(logits[0].argmax()))
    attention, *scores = looked.numpy()
    before = odds(logits[:1])

    def drop(others: list[int]) -> float:
        return float(before - odds(_mean([_without(piece, others) for piece in pieces], weights)))

    effects = Effects(
        attention,
        (before - odds(logits[1:])).tolist(),
        drops(attention, rows, drop, progress),
        dict(zip(PARTS, scores, strict=True)),
    )
    return logits[0], dict(zip(PARTS, (before - odds(parts)).tolist(), strict=True)), effects


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
        ablated = [_ablated(layer, state, context, memory, part) for part, state in enumerate(ablated)]
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
    scores = torch.stack([*parts[:ablated], *parts[ablated + 1 :]]).sum(0)
    mixed = (scores.softmax(-1) @ memory.value).transpose(1, 2).flatten(2)
    return layer.mixed(x, layer.attention.output(mixed))


def _without(piece: Question, others: list[int]) -> Float[Tensor, "1 classes"]:
    """Mean logits of the first row with some rows of the context alone."""
    fewer = piece._replace(context=piece.context[:, others], labels=piece.labels[:, others])
    return fewer.logits(fewer.rows[:, :1], fewer.memories()).mean(0)


def _mean(values: Sequence[Tensor], weights: list[int]) -> Float64[Tensor, "..."]:
    """Weighted mean in float64, on the CPU."""
    weighted = [value.double().cpu() * weight for value, weight in zip(values, weights, strict=True)]
    return torch.stack(weighted).sum(0) / sum(weights)
