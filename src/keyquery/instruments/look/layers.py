"""Metrics of the layers of a model, and of the heads in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Form
from keyquery.instruments.look.embeddings import Embedded, joined
from keyquery.instruments.look.labels import Thresholds, label_head, properties
from keyquery.instruments.look.metrics import metrics_of, of_whole_layer
from keyquery.instruments.look.on_data import SHARES, OnData

Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # metrics of a layer, and of each of its heads


@dataclass(frozen=True)
class Metrics:
    """All that the metrics of a layer come from."""

    heads: Heads
    on_data: OnData
    lengths: Mapping[int, OnData]  # at other window lengths
    embedded: Embedded
    thresholds: Thresholds
    roles: Mapping[tuple[int, int], dict[str, Any]] | None = None  # by layer and head, if measured

    def of(self, index: int) -> Measured:
        """Metrics of a layer and its heads."""
        layer = self.heads[index]
        row, cells = measure_layer(layer, self.heads, self.on_data, self.thresholds)
        cells = self.embedded.joined(layer, _with_lengths(cells, layer, self.heads, self.lengths))
        if self.roles is None:
            return row, cells
        return row, joined(cells, [{"roles": self.roles[layer.index, cell["head"]]} for cell in cells])


def _place(layer: Layer) -> dict[str, Any]:
    notes = {"notes": list(layer.notes)} if layer.notes else {}
    return {"layer": layer.index, "name": layer.name, "kind": layer.kind, **notes}


def measure_layer(layer: Layer, heads: Heads, seen: OnData, thresholds: Thresholds) -> Measured:
    """Metrics of the whole layer, and of each head."""
    form = layer.form.to(torch.promote_types(layer.form.dtype, torch.float32))  # once for all that follows
    cells = _of_heads(layer, form, heads, seen, thresholds)
    return {**_place(layer), "causal": layer.causal, "raw": of_whole_layer(form)}, cells


def _of_heads(layer: Layer, form: Form, heads: Heads, seen: OnData, thresholds: Thresholds) -> list[dict[str, Any]]:
    """Metrics of each head."""
    raw, folded = metrics_of(form, layer.rope), metrics_of(layer.folded)
    rows = []
    for head, on_data in enumerate(seen.of_layer(layer, heads)):
        if on_data is not None and "half_window" in on_data:
            on_data["changes_with_window"] = on_data.pop("sign_changes")
        rows.append(
            {
                **_place(layer),
                "head": head,
                "name": f"{layer.name}.{head}",
                "scale": layer.scale,
                "rank": form.rank,
                "raw": raw[head],
                "folded": folded[head],
                "on_data": on_data,
                **label_head(raw[head], thresholds=thresholds),
                "properties": properties(raw[head], on_data, form.rank, thresholds),
            }
        )
    scores = seen.scores(layer, heads)
    return rows if scores is None else joined(rows, [{"scores": of_head} for of_head in scores])


def _with_lengths(
    cells: list[dict[str, Any]], layer: Layer, heads: Heads, curves: Mapping[int, OnData]
) -> list[dict[str, Any]]:
    """Each head with its shares at other window lengths."""
    rows = {length: seen.of_layer(layer, heads) for length, seen in sorted(curves.items())}
    if not rows or layer.kind == "cross" or next(iter(rows.values()))[0] is None:
        return cells
    kept = (*SHARES, "intervals")
    return [
        {
            **cell,
            "lengths": [
                {"length": length, **{name: (of[head] or {}).get(name) for name in kept}} for length, of in rows.items()
            ],
        }
        for head, cell in enumerate(cells)
    ]
