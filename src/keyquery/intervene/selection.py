"""Selection of heads: (layer, head) pairs, or strings such as "3.*"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

Selection = str | tuple[int, int] | Iterable["str | tuple[int, int]"] | None


def select(heads: Selection, known: Mapping[int, Sequence[int]], labels: Sequence[str] = ()) -> dict[int, list[int]]:
    """The selected heads per layer, among `known`; None selects all.

    A string is LAYER.HEAD, each a number or *, separated by commas. `labels` are those of all layers of the model;
    a layer may be named by its label.
    """
    if heads is None:
        return {layer: list(numbers) for layer, numbers in known.items()}
    if isinstance(heads, int):
        raise ValueError(f'heads must be pairs (layer, head) or strings such as "{heads}.*", got {heads}')
    requested = [heads] if isinstance(heads, str) or _is_pair(heads) else list(heads)
    texts = [
        text for selector in requested for text in (selector.split(",") if isinstance(selector, str) else [selector])
    ]
    chosen: dict[int, set[int]] = {}
    for selector in texts:
        layer, head = _parts(selector, labels)
        layer = _shared(layer, known, labels)
        label = labels[layer] if layer is not None and layer < len(labels) else str(layer)
        label_text = f"{layer} ({label})" if label != str(layer) else label
        for index in _matching(layer, list(known), f"there is no self-attention layer {label_text}", selector):
            numbers = _matching(head, known[index], f"layer {index} has no head {head}", selector)
            chosen.setdefault(index, set()).update(numbers)
    if not chosen:
        raise ValueError("heads must name at least one head, got none")
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def _shared(layer: int | None, known: Mapping[int, Sequence[int]], labels: Sequence[str]) -> int | None:
    """The known one of the nope and rope layers of MLA, which are changed together."""
    if layer is None or layer in known or layer >= len(labels) or not labels[layer].endswith(" nope"):
        return layer
    other = labels[layer].removesuffix("nope") + "rope"
    return labels.index(other) if other in labels else layer


def _parts(selector: object, labels: Sequence[str]) -> tuple[int | None, int | None]:
    """Layer and head; None stands for all."""
    if _is_pair(selector):
        return int(selector[0]), int(selector[1])  # type: ignore[index]
    parts = selector.strip().split(".") if isinstance(selector, str) else []
    parts = [str(labels.index(parts[0])), *parts[1:]] if parts and parts[0] in labels else parts
    if len(parts) != 2 or not all(part == "*" or part.isdecimal() for part in parts):
        raise ValueError(f'heads must be pairs (layer, head) or strings such as "3.*" or "0.1", got {selector!r}')
    layer, head = (None if part == "*" else int(part) for part in parts)
    return layer, head


def _is_pair(value: object) -> bool:
    numbers = isinstance(value, (tuple, list)) and len(value) == 2
    return numbers and all(isinstance(part, Integral) and not isinstance(part, bool) for part in value)  # type: ignore[attr-defined]


def _matching(number: int | None, known: Sequence[int], missing: str, selector: object) -> list[int]:
    if number is None:
        return list(known)
    if number not in known:
        available = (
            f"{min(known)} to {max(known)}" if len(known) == max(known) - min(known) + 1 else str(list(known))[1:-1]
        )
        raise ValueError(f"{missing}, requested by {selector!r}; available: {available}")
    return [number]
