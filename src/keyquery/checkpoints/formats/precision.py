"""Notes on weights that a file holds quantised, or that an adapter changes."""

from __future__ import annotations

from keyquery.checkpoints.family import Location
from keyquery.checkpoints.sources import Source

ROLES = ("query", "key", "fused", "query_down", "query_up", "key_down", "key_up")
PLAIN = ("F64", "F32", "F16", "BF16")  # as GGUF files name them


def precision_notes(source: Source, location: Location) -> tuple[str, ...]:
    """Notes such as "weights: fp8 e4m3 in 128×128 blocks" on a layer's queries and keys, and on an adapter of them."""
    weights = [location.names[role] + location.attention.weight for role in ROLES if role in location.names]
    kinds = [kind for kind in _said(source, "stored", weights) if kind not in PLAIN]
    changes = _said(source, "adapted", weights)
    notes = {f"weights: {' and '.join(kinds)}": kinds, f"adapter: {' and '.join(changes)}": changes}
    return tuple(note for note, holds in notes.items() if holds)


def _said(source: Source, method: str, names: list[str]) -> list[str]:
    """What a source says of tensors, each answer once; nothing if it has no such method."""
    ask = getattr(source, method, None)
    return list(dict.fromkeys(answer for name in names if (answer := ask(name)))) if ask else []
