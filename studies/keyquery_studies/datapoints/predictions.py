"""Predictions of cross-row attention: under two protocols, and with corrupted rows; and symmetry of its heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers.datapoints import Between, DatapointAttention
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, answers, context_of, seen_by

ENTRIES = 2**24  # limit on the embedded values of corrupted tables in one batch


@torch.no_grad()
def predict(
    network: TableNetwork, samples: Samples, plan: Plan, places: Int[np.ndarray, " some"]
) -> Float[Tensor, "n k"]:
    """Predictions of a network for the targets of rows.

    Under a published plan, all rows are in one table without targets, including the predicted ones. Otherwise each row
    is predicted by itself, with the training rows as context.
    """
    if plan.published:
        table = network(*seen_by(plan, samples.rows).within())
        return network.target(table)[0, torch.from_numpy(places).to(table.device)]
    memories = network.memories(seen_by(plan, context_of(samples, samples.learned)).within())
    return answers(network, samples.without_target(places), memories)


@torch.no_grad()
def predict_corrupted(
    network: TableNetwork, samples: Samples, plan: Plan, places: Int[np.ndarray, " some"], seed: int
) -> Float[Tensor, "n k"]:
    """The same, with every column of all other rows permuted independently, anew for every predicted row.

    Marginal distributions of columns are preserved, but no other row stays intact.
    """
    generator = torch.Generator(samples.rows.hidden.device).manual_seed(seed)
    bare = samples.without_target(np.arange(len(samples.rows.hidden)))
    context = seen_by(plan, bare if plan.published else context_of(samples, samples.learned))
    predictions = []
    count = max(ENTRIES // (context.values.numel() * network.index.shape[1]), 1)
    for batch in np.array_split(places, math.ceil(len(places) / count)):
        own = Rows(*(part.unsqueeze(1) for part in bare.take(batch)))
        if plan.published:
            others = torch.arange(len(context.hidden) - 1, device=context.hidden.device)
            kept = others + (others >= torch.from_numpy(batch).to(others).unsqueeze(1))
            tables = shuffled(context.take(kept), generator)
            output = network(*(torch.cat(pair, 1) for pair in zip(tables, own, strict=True)))
            predictions.append(network.target(output)[:, -1])
        else:
            tables = shuffled(context.take(torch.arange(len(context.hidden)).expand(len(batch), -1)), generator)
            predictions.append(network.target(network(*own, network.memories(tables)))[:, 0])
    return torch.cat(predictions)


def shuffled(tables: Rows, generator: torch.Generator) -> Rows:
    """Every column of every table, permuted independently."""
    order = torch.rand(tables.hidden.shape, generator=generator, device=tables.hidden.device).argsort(1)
    return Rows(*(part.gather(1, order) for part in tables))


def metrics_of(
    predicted: Float64[np.ndarray, "n k"], truth: Shaped[np.ndarray, " n"], scale: float = 1.0
) -> dict[str, float | None]:
    """Metrics of predictions: RMSE in the target's units, or accuracy, NLL and, for two classes, AUROC.

    `predicted` holds log-probabilities or logits of classes, or one number standardised by `scale`.
    """
    if predicted.shape[1] == 1:
        return {"rmse": float(scale * np.sqrt(np.square(predicted[:, 0] - truth).mean()))}
    likely = predicted - np.logaddexp.reduce(predicted, axis=1, keepdims=True)
    scores = predicted[:, 1] - predicted[:, 0] if predicted.shape[1] == 2 else None
    return {
        "accuracy": float((predicted.argmax(1) == truth).mean()),
        "nll": float(-likely[np.arange(len(truth)), truth].mean()),
        "auroc": None if scores is None else auroc(scores, truth == 1),
    }


def auroc(scores: Float64[np.ndarray, " n"], positive: Shaped[np.ndarray, " n"]) -> float | None:
    """Probability that a positive scores above a negative, ties counted half; None if either class is absent."""
    high, low = np.sort(scores[positive]), np.sort(scores[~positive])
    if not len(high) or not len(low):
        return None
    below = np.searchsorted(low, high, "left") + np.searchsorted(low, high, "right")
    return float(below.sum() / (2 * len(high) * len(low)))


@torch.no_grad()
def row_heads(network: TableNetwork, rows: Rows) -> list[dict[str, Any]]:
    """Every cross-row head: symmetry of its weights, and the parts of its scores on a table.

    `symmetric` is ‖S‖²/‖M‖² of the weights, M = S + A: about a half at random, plus 1/(2·width). `on_data` is
    symmetric/(symmetric + skew) of the scores of the table, over independent rows.
    """
    layers = [layer.block.attention for layer in network.encoder.layers if isinstance(layer, DatapointAttention)]
    between = [layer for layer in layers if isinstance(layer, Between)]
    captured: list[tuple[Tensor, Tensor]] = []

    def capture(layer: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        source = options.get("source", inputs[0])  # published keys come from other vectors than queries
        captured.append((layer.queries(inputs[0]), layer.memory(source).key))

    hooks = [layer.register_forward_pre_hook(capture, with_kwargs=True) for layer in between]
    network(*rows.within())
    for hook in hooks:
        hook.remove()
    heads = []
    for depth, (layer, (query, key)) in enumerate(zip(between, captured, strict=True)):
        parts = _parts(query[0].double(), key[0].double())
        columns = {"symmetric": (1 + layer.form().symmetry) / 2, **parts}
        for head in range(layer.heads):
            metrics = {name: float(values[head]) for name, values in columns.items()}
            heads.append({"layer": depth, "head": head, **metrics})
    return heads


def _parts(query: Float[Tensor, "h n r"], key: Float[Tensor, "h n r"]) -> dict[str, Float[Tensor, " h"]]:
    """Shares in closed form, as if rows were independent: ‖S‖², ‖A‖² and q̄ᵀΣ_k q̄ over their sum."""
    query, key = query.cpu(), key.cpu()
    pull = query.mean(1)
    query, key = ((part - part.mean(1, keepdim=True)) / part.shape[1] ** 0.5 for part in (query, key))
    of_query, of_key, cross = query.mT @ query, key.mT @ key, key.mT @ query
    norm, swapped = (of_query * of_key).sum((-2, -1)), (cross * cross.mT).sum((-2, -1))
    symmetric, skew = ((norm + sign * swapped).clamp(min=0) / 2 for sign in (1, -1))
    popularity = torch.einsum("hr,hrs,hs->h", pull, of_key, pull)
    both = symmetric + skew
    total = both + popularity
    share = popularity / total.where(total > 0, 1.0)
    return {"on_data": symmetric / both.where(both > 0, 1.0), "popularity": share}
