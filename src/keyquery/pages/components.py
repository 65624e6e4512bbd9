"""What a page's JSON is made of: frames of items with their measures, and the blocks that name components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keyquery.reading import short

DIGITS, END_DIGITS = 5, 3  # of numbers in a page, and of the ends of their intervals


ENDS: tuple[str, ...] = ("low", "high", "null")  # of a measure, besides its values


def measure(key: str, label: str, values: Any, digits: int = DIGITS, **more: Any) -> dict[str, Any]:
    """A measure of every item: a colour of the map, a column of the table.

    `more`: unit, group, form (how values are written), low and high (interval), null (level), words (text instead of
    the value), names and tones (of categories, whose values are indices), ends (words at both ends of the scale), least
    and most (of the scale), hatch (cells whose interval includes 0), short (name on a button).
    """
    given = {name: value for name, value in more.items() if value is not None}
    rounded: dict[str, Any] = {name: short(list(given[name]), END_DIGITS) for name in ENDS if name in given}
    return {"key": key, "label": label, "values": short(list(values), digits), **given, **rounded}


def heads_frame(
    heads: Sequence[Mapping[str, Any]], measures: Sequence[dict[str, Any]], labels: Sequence[str] = ()
) -> dict[str, Any]:
    """The frame of layers by heads; `labels` are names of the layers of models with several stacks."""
    layers = sorted({head["layer"] for head in heads})
    row = {layer: i for i, layer in enumerate(layers)}
    named = {layer: labels[layer] for layer in layers if layer < len(labels)}
    return {
        "rows": [str(layer) for layer in layers],
        "labels": [f"layer {layer} ({named[layer]})" if named.get(layer) else "" for layer in layers],
        "columns": [str(column) for column in range(1 + max(head["head"] for head in heads))],
        "cells": [[row[head["layer"]], head["head"]] for head in heads],
        "measures": list(measures),
    }


def key_of(head: Mapping[str, Any]) -> str:
    """A head as the page addresses it: layer.head."""
    return f"{head['layer']}.{head['head']}"


def column(label: str, values: Sequence[Any], **more: Any) -> dict[str, Any]:
    """A column of a small table."""
    return {"key": label, "label": label, "values": short(list(values), DIGITS), **more}


def versioned(notes: Sequence[str], provenance: Mapping[str, Any]) -> list[str]:
    """Notes as sentences, and the version that computed the reading."""
    sentences = [note if note.endswith(".") else f"{note[:1].upper()}{note[1:]}." for note in notes]
    version = provenance.get("versions", {}).get("keyquery")
    return [*sentences, *([f"keyquery {version}"] if version else [])]
