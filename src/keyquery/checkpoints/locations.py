"""Where a file holds each attention layer: the tensors that an architecture names, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keyquery.checkpoints.configs.towers import towers
from keyquery.checkpoints.family import Attention, Family, composite, families, families_of
from keyquery.checkpoints.sources import OTHER_TOWERS

LAYER = re.compile(r"0|[1-9][0-9]{0,8}")
ANCHORS = ("fused", "key_down", "query", "query_up")
# Roles whose tensors may have another suffix than ".weight", set by the architecture.
ENDINGS = {
    "fused": "weight",
    "query": "weight",
    "key": "weight",
    "value": "weight",
    "distance_key": "weight",
    "packed_bias": "bias",
    "output": "output_weight",
    "norm": "norm_weight",
}
# Biases that are not named after their weights: full names.
OWN_BIASES = ("query_bias", "key_bias", "value_bias", "output_bias")
WHOLE = {*OWN_BIASES, "rotary", "unplaced", "window_table", "row_table", "column_table"}
WHOLE |= {"content_bias", "distance_bias", "frequencies", "ssmax"}
WHOLE.add("dim_scale")  # factors of a query's dimensions, before a softplus
WHOLE.add("head_scale")  # the logarithm of a factor on the scores of each head
WHOLE.add("query_shift")  # what is added to the queries of each head
WHOLE.add("clip")  # a bound of what enters a projection
WHOLE.add("second")  # a packed weight that queries and keys pass after their own
# Roles that a file may lack.
SOMETIMES = {"query_norm", "key_norm", "first_norm", "packed_bias", *WHOLE}
SOMETIMES |= {"reduction", "memory_norm", "distances", "distance_norm", "distance_key", "distance_query"}
SOMETIMES |= {"coordinates", "coordinate_biases"}
# Required roles; one of each group.
NEEDED: dict[str, list[tuple[str, ...]]] = {
    "apart": [("query",), ("key",)],
    "heads": [("query",), ("key",)],
    "columns": [("query",), ("key",)],
    "learned": [("query",), ("key",)],
    "query latent": [("query_up",), ("query_down",), ("key",)],
    "latent": [("query", "query_up"), ("query", "query_down"), ("key_down",), ("key_up",)],
}


@dataclass(frozen=True)
class Location:
    """The location of one attention layer in a file: the full module name of every role present."""

    attention: Attention
    names: dict[str, str]
    layer: int
    prefix: str = ""
    wanted: dict[str, str] = field(default_factory=dict)  # likewise of missing roles, with suffixes

    @property
    def anchor(self) -> str:
        """The full name of the module that its layers are found by: its queries', or the fused one."""
        return next(self.names[role] for role in ANCHORS if role in self.names)

    def bias(self, role: str) -> str:
        """The full name of the bias of a role, present or not."""
        ending = ".bias" if role == "output" else self.attention.bias
        return self.names.get(f"{role}_bias", self.names[role] + ending)

    def lacks(self) -> str | None:
        """A required tensor that is missing, if any."""
        for roles in NEEDED.get(self.attention.order, []):
            if not any(role in self.names for role in roles):
                return next(self.wanted[role] for role in roles[::-1] if role in self.wanted)
        return None


def module_name(location: Location) -> str:
    """The name of the attention module: the common prefix of its roles."""
    if "module" in location.names:
        return location.names["module"] or "attention"
    roles = [
        location.names[role].split(".") for role in ("query", "key", "fused", "key_down") if role in location.names
    ]
    alike = [parts[0] for parts in zip(*roles, strict=False) if len(set(parts)) == 1]
    return ".".join(alike if len(roles) > 1 else alike[:-1]) or "attention"


def locations(family: Family, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> list[Location]:
    """Every attention layer in a file's tensor names: by kind, stack and layer."""
    located: dict[str, Location] = {}
    for attention, tower in _entries(family, tensors, config):
        own_config = section(config, attention.config)
        if not _applies(attention, own_config):
            continue
        kinds = own_config.get("layer_types") if attention.kinds else None
        crossed = replace(attention, kind="cross")
        for location in _with_shared_keys(list(_locations_of(attention, tower)), own_config, crossed):
            if "reduction" in location.names:  # keys of fewer tokens than there are queries
                location = replace(location, attention=crossed)
            if isinstance(kinds, list) and location.layer < len(kinds) and kinds[location.layer] not in attention.kinds:
                continue
            # Of two entries for the same tensors, the later one wins.
            located[location.anchor] = location
    return list(located.values())


def _applies(attention: Attention, config: Mapping[str, Any]) -> bool:
    """Whether the config has the values under which an entry applies, as far as it states them."""
    for key, value in attention.only_if.items():
        if value in ("set", "unset"):
            if (config.get(key) is None) != (value == "unset"):
                return False
        elif config.get(key, value) != value:
            return False
    return True


def _with_shared_keys(stack: list[Location], config: Mapping[str, Any], crossed: Attention) -> list[Location]:
    """The layers of a stack, the last of which use keys of earlier ones where the config says so, as in Gemma 3n.

    Their queries and keys come from different residual streams, as those of cross-attention do. A file may hold key
    weights of theirs, which the model does not use.
    """
    shared, kinds = config.get("num_kv_shared_layers"), config.get("layer_types")
    if not stack or not shared or not isinstance(kinds, list) or stack[0].attention.kind != "self":
        return stack
    first = len(kinds) - int(shared)
    by_layer = {(location.prefix, location.layer): location for location in stack}
    changed = []
    for location in stack:
        alike = [i for i in range(first) if location.layer >= first and kinds[i] == kinds[location.layer]]
        source = by_layer.get((location.prefix, alike[-1])) if alike else None
        if source is not None:
            names = {role: name for role, name in location.names.items() if role not in ("key", "value", "key_norm")}
            names |= {role: source.names[role] for role in ("key", "value", "key_norm") if role in source.names}
            names |= {"memory_norm": source.names["norm"]} if "norm" in source.names else {}
            names["module"] = location.names["query"].rpartition(".")[0]
            location = replace(location, attention=crossed, names=names)
        changed.append(location)
    return changed


def _entries(
    family: Family, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[Attention, Mapping[str, Any]]]:
    """Attentions and the tensors they may be of; those of another architecture where a tower is of another type."""
    if family.composite:
        yield from _composed(tensors, config)
    replaced: set[str] = set()
    for attention in family.attention:
        path = attention.config or ""
        actual = section(config, path).get("model_type") if path and attention.of else None
        known = (None, config.get("model_type"), attention.of)
        if actual in known or str(attention.of).startswith(str(actual)):
            yield attention, tensors
        elif path not in replaced:
            replaced.add(path)
            sight = "text" not in path and "decoder" not in path
            tower = {n: t for n, t in tensors.items() if sight == any(word in n for word in OTHER_TOWERS)}
            for other in (other for family in families_of(actual) for other in family.attention):
                yield replace(other, config=".".join(part for part in (path, other.config) if part)), tower


def _composed(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[Attention, Mapping[str, Any]]]:
    """The attentions of each section of a config, by its model type, and the tensors of its tower."""
    for path, tower in towers(tensors, config).items():
        inner = config[path]
        known = families_of(inner["model_type"])
        family = next((family for family in known if locations(family, tower, inner)), composite())
        for attention, inside in _entries(family, tower, inner):
            full = ".".join(part for part in (path, attention.config) if part)
            yield replace(attention, config=full, gaps=attention.gaps or family.gaps), inside


def section(config: Mapping[str, Any], path: str | None) -> Mapping[str, Any]:
    """A section of a config, as far as the config has it."""
    part_of: Any = config
    for part in path.split(".") if path else ():
        part_of = part_of.get(part) or part_of
    return part_of if isinstance(part_of, Mapping) else config


def _locations_of(attention: Attention, tensors: Mapping[str, Any]) -> Iterator[Location]:
    for names in attention.names:
        anchor = next(role for role in ANCHORS if role in names)
        pattern = _pattern(str(names[anchor]), attention.weight)
        matches = [match for match in map(pattern.fullmatch, tensors) if match]
        stacks: dict[str, list[int]] = {}
        for match in matches:
            stacks.setdefault(match["prefix"], []).append(_number(match))
        for prefix in sorted(stacks, key=natural):
            for layer in sorted(stacks[prefix]):
                yield _location(names, prefix, layer, attention, tensors)
        if matches:
            return


def gap(stacked: list[Location], tensors: Mapping[str, Any]) -> str | None:
    """A missing tensor: of a layer between two others, or the query of a key."""
    stacks: dict[tuple[int, str], list[Location]] = {}
    for location in stacked:
        key = id(location.attention.names), location.prefix  # also where kinds differ
        stacks.setdefault(key, []).append(location)
    for stack in (stack for stack in stacks.values() if not stack[0].attention.gaps):
        layers = {location.layer for location in stack}
        one = stack[0]
        anchor = next(role for role in ANCHORS if role in one.wanted)
        names = next(names for names in one.attention.names if anchor in names and _stands(one, str(names[anchor])))
        keyed = layers | _keyed(one, names.get("key"), tensors)
        for layer in range(min(keyed), max(keyed) + 1):
            if layer not in layers:
                return _full(str(names[anchor]), one.prefix, layer, tensors) + one.attention.weight
    return None


def _stands(location: Location, pattern: str) -> bool:
    return _full(pattern, location.prefix, location.layer, {}) + location.attention.weight in location.wanted.values()


def _keyed(one: Location, key: str | list[str] | None, tensors: Mapping[str, Any]) -> set[int]:
    """The layers that have a key, in the stack of a place."""
    if not isinstance(key, str) or "{layer}" not in key:
        return set()
    matches = map(_pattern(key, one.attention.weight).fullmatch, tensors)
    return {_number(match) for match in matches if match and match["prefix"] == one.prefix}


def _location(
    names: Mapping[str, str | list[str]], prefix: str, layer: int, attention: Attention, tensors: Mapping[str, Any]
) -> Location:
    """Full names of the roles whose tensors are present; `module` needs none."""
    filled: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for role, patterns in names.items():
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            name, ending = _full(pattern, prefix, layer, tensors), ""
            if role not in WHOLE:
                ending = getattr(attention, ENDINGS[role]) if role in ENDINGS else ".weight"
            wanted.setdefault(role, name + ending)
            if role == "module" or name + ending in tensors:
                filled.setdefault(role, name.removesuffix(".") if role == "module" else name)
    return Location(attention, filled, layer, prefix, wanted)


def _full(pattern: str, prefix: str, layer: int, tensors: Mapping[str, Any]) -> str:
    """The name of a role in one layer; "../" leaves the module that the prefix ends in."""
    pattern = pattern.removeprefix("/")
    while pattern.startswith("../"):
        pattern, prefix = pattern[3:], prefix[: prefix.rstrip(".").rfind(".") + 1]
    if "{last}" in pattern:  # of the stack that the name is of
        before, after = (prefix + pattern).split("{last}")
        numbers = (name[len(before) :].partition(".")[0] for name in tensors if name.startswith(before))
        last = max((int(number) for number in numbers if LAYER.fullmatch(number)), default=0)
        return f"{before}{last}{after}"
    return prefix + pattern.format(layer=layer, previous=layer - 1)


def recognise(tensors: Mapping[str, Any]) -> Family | None:
    """The architecture that explains most tensor names, with all roles and marks present."""
    best: tuple[float, int, int] = (0.0, 0, 0)
    chosen = None
    for family in families().values():
        if not family.by_names or not all(any(mark in name for name in tensors) for mark in family.marks):
            continue
        located = [location for location in locations(family, tensors, {}) if _in_ratio(location, tensors)]
        there = {id(location.attention) for location in located}
        wanted = [a for a in family.attention if id(a) in there or not (a.optional or a.only_if)]
        roles = {(id(location.attention), role) for location in located for role in location.names}
        expected = {(id(a), role) for a in wanted for role in a.names[0] if role not in SOMETIMES}
        score = (len(roles & expected) / max(len(expected), 1), len(family.marks), len(roles))
        if located and len(there) == len(wanted) and score > best:
            best, chosen = score, family
    return chosen


def _in_ratio(location: Location, tensors: Mapping[str, Any]) -> bool:
    """Whether the fused tensor has the stated ratio; True if none is stated or known."""
    shape = tensors[location.names["fused"] + location.attention.weight] if location.attention.ratio else None
    if not isinstance(shape, tuple) or len(shape) != 2:
        return True
    rows, columns = location.attention.ratio
    return bool(shape[0] * columns == shape[1] * rows)


def _pattern(name: str, suffix: str) -> re.Pattern[str]:
    layer = re.escape(name.removeprefix("/")).replace(r"\{layer\}", r"(?P<layer>\d+)")
    prefix = "" if name.startswith("/") else r"(?:.+\.)?"
    return re.compile(rf"(?P<prefix>{prefix}){layer}{re.escape(suffix)}")


def _number(match: re.Match[str]) -> int:
    """The layer number of a tensor, which must be in plain decimal: 7, not 07 or ٧."""
    digits = match.groupdict().get("layer", "0")
    if not LAYER.fullmatch(digits):
        raise ValueError(f"{match[0]!r} is a tensor of layer {digits[:20]!r}: expected a number such as 0 or 12")
    return int(digits)


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer.2 before layer.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
