"""The study of the dial as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.forms.parts import PARTS
from keyquery_studies.dial.figure import layers, parts
from keyquery_studies.dial.study import Abilities

NOTE = (
    "Next and repeated tokens are losses in nats, the rest shares; ± is half of a 95 % interval over sequences, for "
    "each comparison alone. Means are by position; other means, single texts, seeds and heads: --json or --csv."
)


def lines(reading: Abilities) -> list[Any]:
    """For each model what every ability loses by each part left out in all heads, and in which layer it loses most."""
    everywhere = [row for row in reading.summary() if row["means"] == "data"]
    by_layer = reading.summary("layer")
    shown: list[Any] = []
    for model in reading.models:
        layers, heads, stored = model["layers"], model["heads"], model["precision"]
        kind = "decoder" if model["causal"] else "encoder"
        title = f"{model['name']}: {kind}, {layers} layers, {heads} heads" + (f", stored as {stored}" if stored else "")
        shown += [Text(title, style="bold"), _everywhere(reading, model, everywhere), ""]
        if any(row["model"] == model["name"] for row in by_layer):
            shown += [_where(reading, model, by_layer), ""]
    return [*shown, NOTE]


def _everywhere(reading: Abilities, model: Mapping[str, Any], rows: list[dict[str, Any]]) -> Table:
    table = _table("change without", "whole", *PARTS)
    for ability in reading.abilities:
        own = {row["part"]: row for row in rows if (row["model"], row["ability"]) == (model["name"], ability["name"])}
        if own:
            cells = (_change(own[part]) if part in own else "–" for part in PARTS)
            table.add_row(ability["name"], f"{own['none']['before']:.2f}", *cells)
    return table


def _where(reading: Abilities, model: Mapping[str, Any], rows: list[dict[str, Any]]) -> Table:
    table = _table("most in layer", *PARTS)
    for ability in reading.abilities:
        own = [row for row in rows if (row["model"], row["ability"]) == (model["name"], ability["name"])]
        if own:
            worse = -1 if ability["better"] == "higher" else 1
            cells = (_worst([row for row in own if row["part"] == part], worse) for part in PARTS)
            table.add_row(ability["name"], *cells)
    return table


def _worst(rows: list[dict[str, Any]], worse: int) -> str:
    if not rows:
        return "–"
    row = max(rows, key=lambda row: worse * row["change"])
    return f"{row['layer']}: {row['change']:+z.2f}"


def _change(row: Mapping[str, Any]) -> str:
    half = f"{(row['high'] - row['low']) / 2:.2f}".removeprefix("0")  # or five parts would not fit
    return f"{row['change']:+z.2f}±{half}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


FIGURES = {"parts": parts, "layers": layers}
