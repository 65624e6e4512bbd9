"""src/keyquery/checkpoints/configs/defaults.toml from transformers' config classes: `python docs/site/defaults.py`.

Of every config type: the defaults of the keys that the reader uses, and the types of its sections. Values
that a class derives from others (a head's width from that of the model) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from keyquery.checkpoints.family import families
from keyquery.checkpoints.layouts import HEADS
from keyquery.checkpoints.norms import EPSILONS

FILE = Path(__file__).parents[2] / "src" / "keyquery" / "checkpoints" / "configs" / "defaults.toml"
HEAD = "# Defaults of config types, written by docs/site/defaults.py from transformers' config classes. Do not edit.\n"
KEYS = {*EPSILONS, *HEADS, "num_hidden_layers", "num_key_value_heads", "head_dim", "sliding_window", "is_decoder"}
KEYS |= {"qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "query_pre_attn_scalar", "attention_multiplier"}
KEYS |= {
    "relative_attention_max_distance",
    "local_attention",
    "rope_interleave",
    "pos_att_type",
    "max_position_embeddings",
}
KEYS |= {"use_bidirectional_attention", "sliding_window_pattern", "original_max_position_embeddings", "window_size"}
KEYS |= {"scale_attn_weights", "scale_attn_by_inverse_layer_idx", "rotary_pct", "rotary_dim", "no_rope_layers"}
KEYS |= {"attention_layers", "max_window_layers", "use_sliding_window", "relative_attention_num_buckets"}
KEYS |= {"rope_theta", "patch_size", "num_kv_shared_layers", "attention_window_size", "attn_scale", "use_attn_scale"}
KEYS |= {"temperature_length", "max_relative_positions", "position_buckets", "relative_attention", "norm_rel_ebd"}
KEYS |= {"max_source_positions", "max_target_positions", "global_attn_every_n_layers", "position_embeddings_type"}
KEYS |= {"attention_window", "local_radius", "attention_chunk_size", "conf_attention_chunk_size"}
KEYS |= {f"{start}attention_context_{side}" for start in ("", "conf_") for side in ("left", "right")}
KEYS |= {"rel_pos_bins", "max_rel_pos", "rel_2d_pos_bins", "max_rel_2d_pos", "has_spatial_attention_bias"}
KEYS |= {"num_buckets", "max_bucket_distance", "position_bias_num_buckets", "position_bias_max_distance"}
KEYS |= {"segment_types", "bbox_scale", "input_size", "crop_size", "frames_per_clip", "tubelet_size"}
LONGEST = 12  # of a period of layer kinds


def used() -> set[str]:
    """The config keys that the reader and its architectures use."""
    keys = set(KEYS)
    for attention in (attention for family in families().values() for attention in family.attention):
        named = (attention.heads, attention.head_dim, attention.softcap, attention.alibi, attention.causal)
        keys |= {part for key in named if key for part in str(key).split(" / ")} | set(attention.only_if)
        keys |= {attention.scale.split(" ", 1)[1]} if " " in attention.scale else set()
        parts = [part for value in attention.grid.values() for part in (value if isinstance(value, list) else [value])]
        keys |= {part for part in (*parts, attention.rotary_dim) if isinstance(part, str)}
    return keys - {"hidden_size"}  # every config has one, and it decides whether values stand outside of a section


def defaults_of(cls: Any, keys: set[str]) -> dict[str, Any]:
    """The defaults of a config class."""
    whole = cls().to_dict()
    own = {field.name: field.default for field in fields(cls)}
    chosen = {key: own[key] for key in sorted(keys) if _plain(own.get(key))}
    chosen |= _rope(whole.get("rope_parameters") or {})
    kinds = whole.get("layer_types")
    if isinstance(kinds, list) and (period := _period(kinds)):
        chosen["layer_types"] = period
    for key, value in whole.items():
        if isinstance(value, Mapping) and isinstance(value.get("model_type"), str) and value["model_type"]:
            inner = {k: v for k, v in value.items() if k in keys and k in own_defaults(value["model_type"], k, v)}
            chosen[key] = {"model_type": value["model_type"], **inner}
    return chosen


def own_defaults(model_type: str, key: str, value: Any) -> set[str]:
    """The key, if a section's value of it is not the default of the section's own class."""
    from transformers import CONFIG_MAPPING

    known = {field.name: field.default for field in fields(CONFIG_MAPPING[model_type])}
    return {key} if _plain(value) and _plain(known.get(key)) and known[key] != value else set()


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (isinstance(value, list) and all(map(_plain, value)))


def _rope(said: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters where they stand in older configs, and as a whole where that does not say it."""
    kinds = {key: value for key, value in said.items() if isinstance(value, Mapping)}
    if kinds:
        bases = {"rope_theta": kinds.get("full_attention", {}).get("rope_theta")}
        bases["rope_local_base_freq"] = kinds.get("sliding_attention", {}).get("rope_theta")
        return {"rope_parameters": dict(said), **{key: value for key, value in bases.items() if value}}
    flat = {key: said[key] for key in ("rope_theta", "partial_rotary_factor") if said.get(key)}
    return {**flat, **({} if said.get("rope_type", "default") == "default" else {"rope_parameters": dict(said)})}


def _period(kinds: list[str]) -> list[str]:
    """The shortest list whose repetition gives the kinds; empty if there is none that repeats."""
    for length in range(1, min(LONGEST, len(kinds) // 2) + 1):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return kinds[:length]
    return []


def lines() -> Iterator[str]:
    """The file, a line per type."""
    from transformers import CONFIG_MAPPING

    keys = used()
    for model_type in sorted(CONFIG_MAPPING.keys()):
        try:
            chosen = defaults_of(CONFIG_MAPPING[model_type], keys)
        except Exception as error:  # a class without a default config, or one that needs another package
            print(f"{model_type}: {type(error).__name__}: {str(error)[:80]}")
            continue
        if chosen:
            yield f"{_key(model_type)} = {_value(chosen)}\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    FILE.write_text(HEAD + "".join(lines()), encoding="utf-8")
