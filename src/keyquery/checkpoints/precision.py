"""Notes on the precision of weights that a file holds quantised."""

from __future__ import annotations

from keyquery.checkpoints.family import Place
from keyquery.checkpoints.sources import Source

ROLES = ("query", "key", "fused", "query_down", "query_up", "key_down", "key_up")
PLAIN = ("F64", "F32", "F16", "BF16")  # as GGUF files name them


def precision_notes(source: Source, place: Place) -> tuple[str, ...]:
    """A note such as "weights: fp8 e4m3 in 128×128 blocks" if a layer's queries or keys are stored quantised."""
    stored = getattr(source, "stored", None)
    if stored is None:
        return ()
    weights = (place.names[role] + place.attention.weight for role in ROLES if role in place.names)
    kinds = dict.fromkeys(kind for name in weights if (kind := stored(name)) and kind not in PLAIN)
    return (f"weights: {' and '.join(kinds)}",) if kinds else ()
