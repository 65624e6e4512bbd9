"""Attribution of a prediction to rows and columns: attention, and the effect of ablating them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers.datapoints import Memory
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import answers
from keyquery.reading import Reading
from keyquery.support.progress import Progress

Odds = Callable[[Tensor, int], Tensor]


class Attribution:
    """What explanations of one prediction share: its columns, and training rows, most attended first."""

    predicted: Any
    columns: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        size = f"{len(self.columns)} columns, {len(self.rows)} rows"
        return f"{type(self).__name__}(predicted {self.predicted!r}, {size})"

    def records(self) -> list[dict[str, Any]]:
        """One row per column, then per part of the scores if they were taken apart, then per training row."""
        parts: Mapping[str, float] = getattr(self, "parts", {})
        shown = ("attention", *parts, "effect")
        blank = dict.fromkeys(("part", "name", "value", *shown))
        records = [
            {**blank, "part": "column", "name": row["column"], "value": row["value"], "effect": row["effect"]}
            for row in self.columns
        ]
        records += [{**blank, "part": "score", "name": name, "effect": effect} for name, effect in parts.items()]
        return records + [
            {"part": "row", "name": str(row["row"]), "value": row["target"], **{name: row[name] for name in shown}}
            for row in self.rows
        ]


@dataclass(frozen=True, kw_only=True, repr=False)
class NPTExplanation(Attribution, Reading, kind="npt explanation"):
    """Attribution of one prediction: every column of the row, and the rows of the support set, most attended first.

    `attention` over all rows of the support set and `own`, the attention of the row to itself, sum to 1.
    """

    units: ClassVar[Mapping[str, str]] = {
        "attention": "mean over row-attention layers and heads",
        "own": "the same, of the row to itself",
        "effect": "drop of the prediction without it: nats of log-odds of the class, or units of the target",
    }

    predicted: Any  # the predicted class or value
    probability: float | None  # of the class; None for regression
    own: float
    columns: Sequence[Mapping[str, Any]]  # name, value and effect of each column
    rows: Sequence[Mapping[str, Any]]  # rows of the support set, most attended first

    __repr__ = Attribution.__repr__


class Effects(NamedTuple):
    """Attention to the rows of the support set, drops of the prediction, and the parts of scores if taken apart."""

    attention: Float[np.ndarray, " m"]
    columns: list[float]  # without each column
    rows: dict[int, float]  # without each of the most attended rows
    scores: Mapping[str, Float[np.ndarray, " m"]] = {}


def by_attention(attention: Float[np.ndarray, " m"]) -> list[int]:
    """Rows by attention, most first."""
    return np.argsort(-attention, kind="stable").tolist()


def drops(
    attention: Float[np.ndarray, " m"], rows: int, drop: Callable[[list[int]], float], progress: Progress
) -> dict[int, float]:
    """The drops of a prediction without each of the most attended rows; `drop` gets the numbers of all other rows."""
    tried = by_attention(attention)[:rows] if len(attention) > 1 else []
    every = range(len(attention))
    return {row: drop([*every[:row], *every[row + 1 :]]) for row in progress(tried, "removing rows", len(tried))}


@torch.no_grad()
def attribute(
    network: TableNetwork, context: Rows, row: Rows, rows: int, odds: Odds, progress: Progress
) -> tuple[Float64[Tensor, " k"], float, Effects]:
    """The output, the attention of the row to itself, and effects of columns and of the `rows` most attended rows."""
    gathered: list[Tensor] = []
    memories = network.memories(context.within(), gathered)
    attention, to_itself = _attention(network, row, memories, gathered, len(context.hidden))
    output = answers(network, row, memories).double().cpu()
    chosen = int(output[0].argmax())

    def drop(row: Rows, memories: list[Memory]) -> Tensor:
        return odds(output, chosen) - odds(answers(network, row, memories).double().cpu(), chosen)

    d = row.hidden.shape[1] - 1
    hidden = row.hidden.expand(d, -1) | torch.eye(d, d + 1, dtype=torch.bool, device=row.hidden.device)
    columns = drop(Rows(row.values.expand(d, -1), row.codes.expand(d, -1), hidden), memories)
    without = drops(
        attention,
        rows if memories else 0,
        lambda others: float(drop(row, network.memories(context.take(others).within()))),
        progress,
    )
    return output[0], to_itself, Effects(attention, columns.tolist(), without)


def _attention(
    network: TableNetwork, row: Rows, memories: list[Memory], gathered: list[Tensor], count: int
) -> tuple[Float64[np.ndarray, " m"], float]:
    """The mean over layers; through inducing points, the product of both attention maps."""
    seen: list[Tensor] = []
    network(*row.within(), memories, seen)
    if not seen:
        return np.zeros(count), 1.0
    if gathered:
        seen = [to_points @ from_rows for to_points, from_rows in zip(seen, gathered, strict=True)]
    weights = torch.stack([layer_weights[0, 0] for layer_weights in seen]).double().mean(0).cpu().numpy()
    return weights[:count], float(weights[count:].sum())
