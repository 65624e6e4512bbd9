"""What is to be known of a layer beside its weights: its term of positions, and notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.checkpoints.locations import Location
from keyquery.checkpoints.norms import token_width
from keyquery.checkpoints.positions.relative import GIVEN, TABLES, VECTORS
from keyquery.checkpoints.sources import Source

Config = Mapping[str, Any]
ROLES = ("query", "key", "fused", "query_down", "query_up", "key_down", "key_up")
UNFOLDED = "the norm that feeds it is not read: folded forms act on what that norm returns"
PLAIN = ("F64", "F32", "F16", "BF16")  # as GGUF files name them


def position_of(location: Location, config: Config) -> str:
    """The term of positions; "rotary" where there is a rotation that is not read."""
    attention, tables = location.attention, {"decomposed": "row_table", **dict.fromkeys(TABLES[:2], "window_table")}
    if attention.position in tables and tables[attention.position] not in location.names:
        return "none"
    if attention.alibi and config.get(attention.alibi):
        return "scaled alibi"
    if attention.axes:
        return "axial"
    if attention.norm_after_rope and "query_norm" in location.names:
        return "rotary before norm"
    return "rotary" if attention.rope == "unread" else attention.position


def layer_notes(location: Location, source: Source, config: Config, part: str, shifted: bool) -> tuple[str, ...]:
    """What a reader should know of a layer: what its forms do not hold, and what was assumed."""
    attention, rotary = location.attention, "rotary" in location.names
    assumed = attention.scale == "transformer_lens" and not config
    owner = location.names.get("key", "").rpartition(".")[0]
    clip = config.get("clip_qkv") or (config.get("attn_config") or {}).get("clip_qkv")
    differ = len({token_width(location, source, role, 0) for role in ("query", "key") if role in location.names}) > 1
    notes = {
        str(attention.note): attention.note is not None,
        "its queries are scaled by a function of themselves (SSMax), which no form has": "ssmax" in location.names,
        f"its keys are those of {owner}": location.names.get("module") not in (None, owner) and "key" in location.names,
        "queries and keys are of tokens of different widths: forms act on the sum of both spaces": differ,
        "the content-to-content kernel only": attention.position == "disentangled",
        "vectors of relative positions meet its queries, which no form has": attention.position in VECTORS
        and attention.position != "disentangled",
        "where it has fewer queries than keys, each is the largest of several by feature, which no form has": (
            attention.pool is not None
        ),
        f"one block used by all {config.get('num_hidden_layers', 'its')} layers": attention.shared,
        f"the {part} kernel of a latent head; the scores of both add up": attention.order == "latent",
        "rotary positions unknown: there is no config": bool(attention.rope and not config)
        and "frequencies" not in location.names,
        "rotary positions enter its scores and are not read": rotary or attention.rope == "unread",
        "queries and keys are normed after their rotation, which no form has: forms hold at equal positions": (
            attention.norm_after_rope and "query_norm" in location.names
        ),
        "positions are rows and columns: scores depend on no single offset": bool(attention.axes),
        "a term of positions is added to its scores and not read": attention.position == "unread",
        f"{GIVEN.get(attention.position)} is added to its scores and not read": attention.position in GIVEN,
        "a causal mask and a scale of 1/√r are assumed: there is no config": assumed,
        "the shift of its query and key norms is in no form": shifted,
        UNFOLDED: attention.norm_unread,
        f"queries and keys are clipped to ±{clip}, which no form has": clip is not None,
        "what enters and leaves its projections is clipped, which no form has": "clip" in location.names,
        f"scores grow with positions beyond {config.get('temperature_length')}, which is not read": bool(
            config.get("temperature_length")
        ),
    }
    return tuple(note for note, holds in notes.items() if holds)


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
