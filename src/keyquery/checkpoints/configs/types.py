"""What is known of each config type of transformers: its defaults, and which of its fields move scores.

`types.jsonl.xz` has a line per type; `python -m tools.architectures fields` writes it.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple


class Known(NamedTuple):
    """What is known of a type; `moves` is None for a type of which no tiny model could be tried."""

    defaults: dict[str, Any]  # of its config class
    moves: dict[str, list[Any] | None] | None = (
        None  # fields that move scores: the values that are read exactly; None: any
    )
    others: frozenset[str] = frozenset()  # the other fields
    pairs: tuple[Mapping[str, Any], ...] = ()  # values that are read exactly, but not together
    tensors: frozenset[str] = frozenset()  # patterns of tensors in attention modules that are of no score
    ignored: tuple[str, ...] = ()  # fields that the type's models do not look at, whatever other types do
    aliases: Mapping[str, str] = MappingProxyType({})  # other names of fields that a config may state


UNKNOWN = Known({})


@cache
def _lines() -> dict[str, str]:
    packed = files("keyquery.checkpoints.configs").joinpath("types.jsonl.xz").read_bytes()
    return {line[2 : line.index('"', 2)]: line for line in lzma.decompress(packed).decode().splitlines()}


def transformers_version() -> str:
    """The version whose types these are."""
    return str(json.loads(_lines()[""])[1])


def known(model_type: Any) -> Known:
    """What is known of a type; nothing of one that transformers did not have."""
    return _known(model_type) if isinstance(model_type, str) and model_type and model_type in _lines() else UNKNOWN


@cache
def _known(model_type: str) -> Known:
    _, defaults, moves, others, pairs, tensors, ignored, aliases = json.loads(_lines()[model_type])
    return Known(defaults, moves, frozenset(others), tuple(pairs), frozenset(tensors), tuple(ignored), aliases)
