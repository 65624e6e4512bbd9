"""Small configs of any model type: all widths divided by one factor, so that their relations stay as they were."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

MAX_DEPTH = 10_000  # layers of a config
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "layers")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("keyquery.proof").joinpath("sizes.toml").read_text(encoding="utf-8"))


@cache
def is_kind(kind: str, key: str) -> bool:
    """Whether a key of a config is that of a number of this kind: "heads", "width" and the like."""
    return re.fullmatch("".join(_table()["patterns"][kind]), key) is not None


@dataclass(frozen=True)
class _Plan:
    """By how much the widths and the numbers of heads of a config are divided, and which of its layers are kept."""

    factor: int
    by_heads: int
    depth: int
    kept: list[int]


def shrink(facts: Mapping[Any, Any], factor: int) -> dict[Any, Any]:
    """A config's values with all widths divided by `factor`, few layers of every kind, few experts, a small vocabulary.

    Sub-configs are shrunk alike. The number of heads is reduced with the width where it can be.
    """
    plan = _Plan(factor, _fewer_heads(facts, factor), *_kept_layers(facts))
    small = {key: _shrunk(key, value, plan) if isinstance(key, str) else value for key, value in facts.items()}
    _complete(small)
    _add_sections(small)
    limit = _table()["unstated"]["vocab_size"]
    vocabulary = next((v for k, v in small.items() if "vocab_size" in str(k) and isinstance(v, int)), limit)
    return _tokens(small, vocabulary if vocabulary > 8 else limit)


def _shrunk(key: str, value: Any, plan: _Plan) -> Any:
    if not isinstance(value, Mapping):
        return _value(key, value, plan)
    if _by_layer(value):
        numbers = {old: new for new, old in enumerate(plan.kept)}
        parts = {numbers[int(index)]: part for index, part in value.items() if int(index) in numbers}
        return {index: shrink(part, plan.factor) for index, part in parts.items()}
    if key.startswith("rope_") or "label" in key:
        return _rope(value, plan.factor // plan.by_heads)
    return shrink(value, plan.factor)


def _value(key: str, value: Any, plan: _Plan) -> Any:
    if isinstance(value, (list, tuple)):
        if len(value) == plan.depth and plan.depth > len(plan.kept):
            return [value[index] for index in plan.kept]
        if is_kind("layers", key):
            return [min(size, 2) if _is_count(size) else size for size in value]
        if not value or not all(_is_count(size) for size in value):
            return value
        return [_value(key, size, _Plan(plan.factor, plan.by_heads, 0, [])) for size in value]
    return _count(key, value, plan) if _is_count(value) else value


def _count(key: str, value: int, plan: _Plan) -> int:
    table, factor, by_heads = _table(), plan.factor, plan.by_heads
    if key in table["limits"]:
        return min(value, table["limits"][key])
    if is_kind("layers", key):
        return len(plan.kept) if value == plan.depth else min(value, 2)
    for kind, limit in (("vocabulary", table["unstated"]["vocab_size"]), ("experts", 8), ("small", 2)):
        if is_kind(kind, key):
            return min(value, limit)
    if is_kind("heads", key):
        return max(1, value // by_heads)
    if is_kind("head_dim", key):
        return value * by_heads // factor if value * by_heads >= factor else value
    if is_kind("every", key):
        return min(value, 2)
    if key == "upsample_groups":
        return max(1, value // factor)
    return value // factor if value >= 32 and is_kind("width", key) and value % factor == 0 else value


def _by_layer(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping has numbers of layers as its keys, and mappings as its values."""
    return bool(value) and all(str(key).isdecimal() and isinstance(part, Mapping) for key, part in value.items())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fewer_heads(facts: Mapping[Any, Any], factor: int) -> int:
    """By how much head counts are divided; head widths take the rest of the factor, and stay multiples of 8."""
    counts, width = _heads(facts), _head_dim(facts)
    options = [by for by in (8, 4, 2, 1) if factor % by == 0]
    for smallest in (16, 8, 4, 2):
        for by in options:
            if any(count % by or count // by < 2 for count in counts):
                continue
            if width is None:
                return by
            narrow, rest = divmod(width, factor // by)
            if not rest and narrow >= smallest and not narrow % min(smallest, 8):
                return by
    return 1


def _heads(facts: Mapping[Any, Any]) -> list[int]:
    counts: list[Any] = []
    for key, value in facts.items():
        if isinstance(key, str) and is_kind("heads", key) and not re.search("key_value|kv|linear", key):
            counts += value if isinstance(value, (list, tuple)) else [value]
    return [count for count in counts if _is_count(count) and count > 0]


def _head_dim(facts: Mapping[Any, Any]) -> int | None:
    for key in ("head_dim", "d_kv", "qk_rope_head_dim", "kv_channels", "attention_head_dim"):
        if _is_count(facts.get(key)) and facts[key]:
            return int(facts[key])
    width: Any = next((facts[k] for k in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim") if k in facts), None)
    counts = _heads(facts)
    return width // max(counts) if _is_count(width) and counts and width % max(counts) == 0 else None


def _kept_layers(facts: Mapping[Any, Any]) -> tuple[int, list[int]]:
    """The depth of a stack, and which of its layers are kept: the first and last of each kind, and at least two."""
    depth = next((facts[name] for name in DEPTHS if _is_count(facts.get(name))), 0)
    if depth <= 2:
        return depth, list(range(depth))
    if depth > MAX_DEPTH:
        raise ValueError(f"a config with {depth} layers is not proven; the limit is {MAX_DEPTH}")
    lists = [v for v in facts.values() if isinstance(v, (list, tuple)) and len(v) == depth]
    tables = [v for v in facts.values() if isinstance(v, Mapping) and _by_layer(v)]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index in range(depth):
        layer_kinds = [str(table.get(index, table.get(str(index)))) for table in tables]
        kinds.setdefault((*layer_kinds, *(str(v[index]) for v in lists)), []).append(index)
    kept = sorted({index for layers in kinds.values() for index in (layers[0], layers[-1])})
    if len(kept) > 8:  # values of their own in each layer
        kept = [0, 1, depth - 2, depth - 1]
    periodic = any(is_kind("every", str(key)) and _is_count(value) and value > 1 for key, value in facts.items())
    rest = [index for index in range(depth) if index not in kept]
    return depth, sorted(kept + rest[: max(0, (4 if periodic else 2) - len(kept))])


def _rope(parameters: Mapping[Any, Any], by: int) -> Any:
    """Rotary parameters of narrower heads: sections and factors by pair are thinned."""
    changed: dict[Any, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            changed[key] = _rope(value, by)
        elif key.endswith("_section") and isinstance(value, (list, tuple)):
            changed[key] = _section(list(value), by)
        elif key in ("short_factor", "long_factor"):
            changed[key] = list(value)[:: max(by, 1)]
        else:
            changed[key] = value
    return changed


def _complete(facts: dict[Any, Any]) -> None:
    """Give values to what is None in a default config and in no released one."""
    heads, width = facts.get("num_attention_heads"), facts.get("hidden_size")
    depth: Any = facts.get("num_hidden_layers")
    unstated = {**_table()["unstated"], "mlp_layer_types": ["sparse"] * (depth if _is_count(depth) else 0)}
    if _is_count(heads) and _is_count(width) and heads:
        unstated |= {"num_key_value_heads": heads} | ({} if width % heads else {"head_dim": width // heads})
    facts.update({key: value for key, value in unstated.items() if key in facts and facts[key] is None})


def _add_sections(facts: dict[Any, Any]) -> None:
    """Give rotary parameters the sections that their heads need."""
    kind, rope, width = str(facts.get("model_type")), facts.get("rope_parameters"), _head_dim(facts)
    sizes = next((sizes for start, sizes in _table()["axes"].items() if kind.startswith(start)), None)
    if sizes is None or width is None or not isinstance(rope, Mapping) or "vision" in kind:
        return
    pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    if sum(rope.get("mrope_section", sizes)) != pairs:
        even = pairs * 11 // 32  # the first two alike, as ERNIE needs them
        section = [even, even, pairs - 2 * even] if sizes[0] == sizes[1] else _section(sizes, sum(sizes) / pairs)
        facts["rope_parameters"] = {**rope, "mrope_section": section}


def _section(sizes: list[int], by: float) -> list[int]:
    """Sizes that add up to a `by`-th of their sum, each at least 1 and nearly in proportion."""
    ends = [round(sum(sizes[:n]) / by) for n in range(len(sizes) + 1)]
    return [max(1, b - a) for a, b in pairwise(ends)]


def _tokens(facts: dict[Any, Any], vocabulary: int) -> dict[Any, Any]:
    """Ids of special tokens within the vocabulary, distinct where they were."""
    free = iter(range(vocabulary - 1, 3, -1))
    moved: dict[int, int] = {}

    def inside(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [inside(part) for part in value]
        if not _is_count(value) or value < vocabulary:
            return value
        if value not in moved:
            moved[value] = next(free, vocabulary - 1)
        return moved[value]

    return {key: inside(value) if is_kind("token", str(key)) else value for key, value in facts.items()}
