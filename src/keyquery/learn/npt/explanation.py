"""Attribution of a prediction to rows and columns: attention, and the effect of ablating them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import answers
from keyquery.reading import Reading
from keyquery.support.progress import Progress

Odds = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True, repr=False)
class NPTExplanation(Reading, kind="npt explanation"):
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

    def __repr__(self) -> str:
        return f"NPTExplanation(predicted {self.predicted!r}, {len(self.columns)} columns, {len(self.rows)} rows)"

    def records(self) -> list[dict[str, Any]]:
        """One row per column, then one per row of the support set."""
        shown = ("attention", "effect")
        columns = [
            {"part": "column", "name": row["column"], "value": row["value"], "attention": None, "effect": row["effect"]}
            for row in self.columns
        ]
        return columns + [
            {"part": "row", "name": str(row["row"]), "value": row["target"], **{name: row[name] for name in shown}}
            for row in self.rows
        ]


class Effects(NamedTuple):
    """The result of `attribute`; rows by their index in the support set."""

    output: Float64[Tensor, " k"]
    own: float
    attention: list[float]
    order: list[int]
    columns: list[float]
    rows: dict[int, float]


@torch.no_grad()
def attribute(network: TableNetwork, context: Rows, row: Rows, rows: int, odds: Odds, progress: Progress) -> Effects:
    """Attention to every row of the support set, and effects of the columns and of the `rows` most attended rows."""
    gathered: list[Tensor] = []
    memories = network.memories(context.within(), gathered)
    attention, own = _attention(network, row, memories, gathered, len(context.hidden))
    outputs = answers(network, row, memories).double().cpu()
    chosen = int(outputs[0].argmax())
    before = odds(outputs, chosen)
    d = row.hidden.shape[1] - 1
    hidden = row.hidden.expand(d, -1) | torch.eye(d, d + 1, dtype=torch.bool, device=row.hidden.device)
    without = Rows(row.values.expand(d, -1), row.codes.expand(d, -1), hidden)
    columns = before - odds(answers(network, without, memories).double().cpu(), chosen)
    order = attention.argsort(descending=True, stable=True).tolist()
    lost, tried = {}, order[:rows] if memories and len(order) > 1 else []
    for place in progress(tried, "removing rows", len(tried)):
        kept = [other for other in range(len(order)) if other != place]
        fewer = network.memories(context.take(kept).within())
        lost[place] = float(before - odds(answers(network, row, fewer).double().cpu(), chosen))
    return Effects(outputs[0], own, attention.tolist(), order, columns.tolist(), lost)


def _attention(
    network: TableNetwork, row: Rows, memories: list[Any], gathered: list[Tensor], count: int
) -> tuple[Float64[Tensor, " m"], float]:
    """The mean over layers; through inducing points, the product of both attention maps."""
    seen: list[Tensor] = []
    network(*row.within(), memories, seen)
    if not seen:
        return torch.zeros(count, dtype=torch.float64), 1.0
    if gathered:
        each = [(to_points @ from_rows)[0, 0] for to_points, from_rows in zip(seen, gathered, strict=True)]
        return torch.stack(each).double().mean(0).cpu(), 0.0
    weights = torch.stack([layer_weights[0, 0] for layer_weights in seen]).double().mean(0).cpu()
    return weights[:-1], float(weights[-1])
