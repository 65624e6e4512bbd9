"""What a config leaves out: files on the hub often hold only the values that differ from the defaults of their type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.checkpoints.configs.towers import LANGUAGE
from keyquery.checkpoints.configs.types import known

# Keys that say how positions are rotated; where a config has one of them, the default is not taken as a whole.
BASES = ("global_rope_theta", "rotary_emb_base")  # other names of rope_theta
ROPE = (*BASES, "rope_scaling", "rope_theta", "rope_local_base_freq", "local_rope_theta")
SHARES = ("rotary_pct", "rotary_dim")  # other names of partial_rotary_factor
# Keys from which older configs derive `layer_types`, but for the period below.
DERIVING = ("use_sliding_window", "max_window_layers", "attn_layer_period", "attn_layer_indices", "attention_layers")
ROPE_DICTS = ("rope_parameters", "rope_scaling")
KINDS = ("full_attention", "sliding_attention", "chunked_attention")  # of layers with rotary parameters of their own
PERIODS = ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers")


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its type in place of what it leaves out, and its sections likewise."""
    facts = known(config.get("model_type"))
    defaults, full = facts.defaults, dict(config)
    full |= {name: config[alias] for alias, name in facts.aliases.items() if alias in config and name not in config}
    for name in facts.ignored:
        full = _without(full, name.split("."))
    for key, value in defaults.items():
        if isinstance(value, Mapping) and "model_type" in value:
            full[key] = _section(config, key, value)
        elif key == "rope_parameters" and "rope_type" in value:  # of all layers alike; a base may stand outside
            full |= {} if _said(key, {**config, "rope_theta": None}) else {key: value}
        elif key != "layer_types" and not _said(key, full):
            full[key] = value
    depth = full.get("num_hidden_layers")
    if (
        (every := defaults.get("no_rope_layer_interval"))
        and not config.get("no_rope_layers")
        and isinstance(depth, int)
    ):
        every = config.get("no_rope_layer_interval") or every
        full["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(depth)]
    if "layer_types" in defaults and config.get("layer_types") is None:
        full |= _layer_types(full if every else config, defaults["layer_types"], depth)
    return {k: completed(v) if isinstance(v, Mapping) and "model_type" in v else v for k, v in full.items()}


def _without(config: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    """A config without a field, which may be one of its rotary parameters ("rope.…"), wherever these stand."""
    kept = {key: value for key, value in config.items() if key != path[-1]}
    if path[0] == "rope":
        kept |= {key: _without(kept[key], path) for key in ROPE_DICTS if isinstance(kept.get(key), Mapping)}
        kept |= {key: _without(v, path) for key, v in kept.items() if key in KINDS and isinstance(v, Mapping)}
    return kept


def _section(config: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section of a config; older ones have the values of the language tower outside of it."""
    said = config.get(key)
    if not said and key.startswith(LANGUAGE) and "hidden_size" in config:
        said = {k: v for k, v in config.items() if k in ROPE_DICTS or not isinstance(v, Mapping)}
        return {**said, "model_type": known["model_type"]}
    return {"model_type": known["model_type"], **said} if isinstance(said, Mapping) and said else known


def _said(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a config has a value of a key, perhaps under another name."""
    if key in config:
        return True
    others = {"rope_parameters": ROPE, "rope_theta": BASES, "partial_rotary_factor": SHARES}.get(key, ())
    return any(config.get(other) is not None for other in others)


def _layer_types(config: Mapping[str, Any], kinds: list[str], depth: Any) -> dict[str, list[str]]:
    """The kinds of layers where they repeat; none where the config derives them in a way of its own."""
    if "chunked_attention" in kinds and config.get("no_rope_layers"):  # Llama 4's chunks go with rotary positions
        return {
            "layer_types": ["chunked_attention" if turned else "full_attention" for turned in config["no_rope_layers"]]
        }
    period = next((config[key] for key in PERIODS if config.get(key)), len(kinds))
    derived = any(config.get(key) is not None for key in DERIVING)
    if derived or not isinstance(depth, int) or period != len(kinds):
        return {}
    return {"layer_types": [kinds[layer % period] for layer in range(depth)]}
