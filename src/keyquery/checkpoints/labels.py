"""Labels of layers: their number among all attention layers, and their stack in models with several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

STACKS = ("encoder", "decoder", "text", "vision")
PART = re.compile(r" \((\w+)\)$")  # one of the two kernels of MLA, in the layer's name


def layer_labels(layers: Sequence[tuple[str, str]]) -> list[str]:
    """Labels of layers from their names and kinds: "encoder 0", "cross 3", "0 rope"; else their numbers."""
    numbers = [str(index) for index in range(len(layers))]
    several = len({(re.sub(r"\d+", "", PART.sub("", name)), kind) for name, kind in layers}) > 1
    if not several and not any(PART.search(name) for name, _ in layers):
        return numbers
    labels = [_label(name, kind, several) for name, kind in layers]
    return labels if len(set(labels)) == len(labels) else numbers


def _label(name: str, kind: str, several: bool) -> str:
    part, parts = PART.search(name), PART.sub("", name).split(".")
    block = next((part for part in parts if part.isdecimal()), "")
    stack = next((word for part in parts for word in STACKS if part.startswith(word)), kind)
    words = ((stack if kind == "self" else kind) if several else "", block, part[1] if part else "")
    return " ".join(word for word in words if word)


def name_of(model: Mapping[str, Any], layer: int, head: int | None = None) -> str:
    """A layer or head as tables and messages name it; `model` are the facts of a reading, or of Heads."""
    number, labels = f"{layer}" if head is None else f"{layer}.{head}", model.get("labels") or []
    return f"{number} {labels[layer]}" if layer < len(labels) else number


def family_of(model: Mapping[str, Any]) -> str | None:
    """The architecture that a model counts as; for GGUF, which is only a file format, that of the model in the file."""
    kind = model.get("model_type")
    return str(kind).removeprefix("gguf-") if model.get("family") == "gguf" and kind else model.get("family")
