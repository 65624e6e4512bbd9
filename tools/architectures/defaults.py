"""Defaults of transformers' config classes, of the fields that the reader uses, and the types of their sections.

Values that a class derives from others (a head's width from that of the model) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import keyquery.checkpoints
from keyquery.support.extras import optional

LISTED = re.compile("per_stage|global_attn_indexes")  # what a class fills in where its field is None
BASE = 777.0  # of rotary positions, which no class has
PERIOD = 12  # the longest of a pattern of kinds of layers


@cache
def used() -> set[str]:
    """All words of the reader and its architectures: the fields that it may ask for are among them."""
    folder = Path(keyquery.checkpoints.__file__).parent
    files = [*folder.rglob("*.py"), *(folder / "families").glob("*.toml")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    return words - {"hidden_size"}  # every config has one, and it decides whether values stand outside of a section


def defaults_of(model_type: str) -> dict[str, Any]:
    """The defaults of a type; nothing for a class without a default config, or one that needs another package."""
    cls = optional("transformers", "fields").CONFIG_MAPPING[model_type]
    try:
        return _defaults(cls, used())
    except Exception as error:
        print(f"{model_type}: {type(error).__name__}: {str(error)[:80]}")
        return {}


def aliases_of(model_type: str) -> dict[str, str]:
    """Other names of a type's fields."""
    return dict(getattr(optional("transformers", "fields").CONFIG_MAPPING[model_type], "attribute_map", {}))


def _defaults(cls: Any, keys: set[str]) -> dict[str, Any]:
    """The defaults of a config class."""
    whole = cls().to_dict()
    own = _own(cls)
    chosen = {key: own[key] for key in sorted(keys) if _plain(own.get(key))}
    chosen |= {key: whole[key] for key in keys & whole.keys() if LISTED.search(key) and own.get(key) is None}
    chosen |= _rope(whole.get("rope_parameters") or {}, cls)
    kinds = whole.get("layer_types")
    if isinstance(kinds, list) and (period := _period(kinds)):
        chosen["layer_types"] = period
    for key, value in whole.items():
        if isinstance(value, Mapping) and isinstance(value.get("model_type"), str) and value["model_type"]:
            inner = {k: v for k, v in value.items() if k in keys and k in _own_default(value["model_type"], k, v)}
            chosen[key] = {"model_type": value["model_type"], **inner}
    return chosen


def _own_default(model_type: str, key: str, value: Any) -> set[str]:
    """The key, if a section's value of it is not the default of the section's own class."""
    classes = optional("transformers", "fields").CONFIG_MAPPING
    known = _own(classes[model_type])
    return {key} if _plain(value) and _plain(known.get(key)) and known[key] != value else set()


def _own(cls: Any) -> dict[str, Any]:
    """The default of each field that a class states, with lists for tuples."""
    stated = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(cls)
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (isinstance(value, list) and all(map(_plain, value)))


def _rope(said: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """Rotary parameters where they stand in older configs, and as a whole where that does not say it.

    A base that a config states outside of them counts, but for that of classes whose own parameters have one.
    """
    kinds = {key: value for key, value in said.items() if isinstance(value, Mapping)}
    if kinds:
        bases = {"rope_theta": kinds.get("full_attention", {}).get("rope_theta")}
        bases["rope_local_base_freq"] = kinds.get("sliding_attention", {}).get("rope_theta")
        return {"rope_parameters": dict(said), **{key: value for key, value in bases.items() if value}}
    flat = {key: said[key] for key in ("rope_theta", "partial_rotary_factor") if said.get(key)}
    if said.get("rope_type", "default") == "default":
        return flat
    kept = (cls(rope_theta=BASE).rope_parameters or {}).get("rope_theta") != BASE
    return {**flat, "rope_parameters": {key: value for key, value in said.items() if kept or key != "rope_theta"}}


def _period(kinds: list[str]) -> list[str]:
    """The shortest list whose repetition gives the kinds; empty if there is none that repeats."""
    for length in range(1, min(PERIOD, len(kinds) // 2) + 1):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return kinds[:length]
    return []
