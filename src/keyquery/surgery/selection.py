"""Which heads are meant: pairs of numbers, or texts such as "3.*"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

Selection = str | tuple[int, int] | Iterable["str | tuple[int, int]"] | None


def select(heads: Selection, known: Mapping[int, Sequence[int]], labels: Sequence[str] = ()) -> dict[int, list[int]]:
    """The chosen heads by layer, of those that are `known`; None chooses all.

    A text is LAYER.HEAD, each a number or *, several divided by commas. `labels` are those of all layers of the model,
    also of those that are not known here; a layer may be named by its label.

    >>> select("1.*,0.1", {0: [0, 1], 1: [0, 1]})
    {0: [1], 1: [0, 1]}
    >>> select("decoder 0.*", {0: [0, 1], 1: [0, 1]}, ["encoder 0", "decoder 0", "cross 0"])
    {1: [0, 1]}
    """
    if heads is None:
        return {layer: list(some) for layer, some in known.items()}
    if isinstance(heads, int):
        raise ValueError(f'heads must be pairs (layer, head) or texts such as "{heads}.*", got {heads}')
    asked = [heads] if isinstance(heads, str) or _is_pair(heads) else list(heads)
    texts = [text for one in asked for text in (one.split(",") if isinstance(one, str) else [one])]
    chosen: dict[int, set[int]] = {}
    for one in texts:
        layer, head = _parts(one, labels)
        layer = _shared(layer, known, labels)
        label = labels[layer] if layer is not None and layer < len(labels) else str(layer)
        called = f"{layer} ({label})" if label != str(layer) else label
        for index in _matching(layer, list(known), f"there is no layer {called} of self-attention", one):
            some = _matching(head, known[index], f"layer {index} has no head {head}", one)
            chosen.setdefault(index, set()).update(some)
    if not chosen:
        raise ValueError("heads must name at least one head, got none")
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def _shared(layer: int | None, known: Mapping[int, Sequence[int]], labels: Sequence[str]) -> int | None:
    """Of a latent head's two kernels, which are changed together, the one that is known."""
    if layer is None or layer in known or layer >= len(labels) or not labels[layer].endswith(" nope"):
        return layer
    other = labels[layer].removesuffix("nope") + "rope"
    return labels.index(other) if other in labels else layer


def _parts(one: object, labels: Sequence[str]) -> tuple[int | None, int | None]:
    """Layer and head, None for every one."""
    if _is_pair(one):
        return int(one[0]), int(one[1])  # type: ignore[index]
    parts = one.strip().split(".") if isinstance(one, str) else []
    parts = [str(labels.index(parts[0])), *parts[1:]] if parts and parts[0] in labels else parts
    if len(parts) != 2 or not all(part == "*" or part.isdecimal() for part in parts):
        raise ValueError(f'heads must be pairs (layer, head) or texts such as "3.*" or "0.1", got {one!r}')
    layer, head = (None if part == "*" else int(part) for part in parts)
    return layer, head


def _is_pair(one: object) -> bool:
    numbers = isinstance(one, (tuple, list)) and len(one) == 2
    return numbers and all(isinstance(part, Integral) and not isinstance(part, bool) for part in one)  # type: ignore[attr-defined]


def _matching(wanted: int | None, known: Sequence[int], missing: str, asked: object) -> list[int]:
    if wanted is None:
        return list(known)
    if wanted not in known:
        there = f"{min(known)} to {max(known)}" if len(known) == max(known) - min(known) + 1 else str(list(known))[1:-1]
        raise ValueError(f"{missing}, asked for by {asked!r}; there are {there}")
    return [wanted]
