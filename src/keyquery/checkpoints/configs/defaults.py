"""What a config leaves out: files on the hub often hold only the values that differ from the defaults of their type.

`defaults.toml` has the defaults of transformers' config classes, for the keys that the reader uses;
docs/site/defaults.py writes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from keyquery.checkpoints.configs.towers import LANGUAGE

# Keys that say how positions are rotated; where a config has one of them, the default is not taken as a whole.
BASES = ("global_rope_theta", "rotary_emb_base")  # other names of rope_theta
ROPE = (*BASES, "rope_scaling", "rope_theta", "rope_local_base_freq", "local_rope_theta")
SHARES = ("rotary_pct", "rotary_dim")  # other names of partial_rotary_factor
# Keys from which older configs derive `layer_types`, but for the period below.
DERIVING = ("use_sliding_window", "max_window_layers", "attn_layer_period", "attn_layer_indices", "attention_layers")
ROPE_DICTS = ("rope_parameters", "rope_scaling")
PERIODS = ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers")


@cache
def lines() -> dict[str, str]:
    """The line of each model type in the file of defaults: to parse them all takes longer than to read a model."""
    text = files("keyquery.checkpoints.configs").joinpath("defaults.toml").read_text(encoding="utf-8")
    return {line.partition(" = ")[0].strip('"'): line for line in text.splitlines() if not line.startswith("#")}


@cache
def defaults(model_type: str) -> dict[str, Any]:
    """Defaults of a model type; none if it is not known."""
    return next(iter(tomllib.loads(lines()[model_type]).values())) if model_type in lines() else {}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its type in place of what it leaves out, and its sections likewise."""
    known = defaults(str(config.get("model_type")))
    full = dict(config)
    for key, value in known.items():
        if isinstance(value, Mapping) and "model_type" in value:
            full[key] = _section(config, key, value)
        elif key != "layer_types" and not _said(key, config):
            full[key] = value
    if "layer_types" in known and config.get("layer_types") is None:
        full |= _layer_types(config, known["layer_types"], full.get("num_hidden_layers"))
    return {k: completed(v) if isinstance(v, Mapping) and "model_type" in v else v for k, v in full.items()}


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
    period = next((config[key] for key in PERIODS if config.get(key)), len(kinds))
    derived = any(config.get(key) is not None for key in DERIVING)
    if derived or not isinstance(depth, int) or period != len(kinds):
        return {}
    return {"layer_types": [kinds[layer % period] for layer in range(depth)]}
