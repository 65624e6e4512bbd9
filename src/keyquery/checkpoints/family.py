"""Architectures as data: where their files store queries and keys, and how the model uses them.

`families/` holds one small TOML file per architecture. Names are modules; `{layer}` is the layer's number, `{previous}`
and `{last}` its neighbours, and any prefix is allowed. If disk and memory differ, `names` has two entries.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from keyquery.checkpoints.configs.towers import towers
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
class Attention:
    """One kind of attention of an architecture: tensor names, and how scores are computed."""

    names: list[dict[str, str | list[str]]]
    # Or "cross": queries and keys come from different sequences; "indexer": scores choose the keys that others see
    kind: str = "self"
    # Or the name of a config flag; "always": whatever the config says; "context": where no keys to the right are seen
    causal: bool | str = False
    # Separate tensors, also by "heads" (heads, r, d) or "columns" (d, heads, r); fused: "blocks", "groups", "quarters",
    # "stacked" (3, heads, r, d); "latent" (MLA), "query latent" (queries alone);
    # "learned": the query's tensor are tokens, which are queries as they are
    order: str = "apart"
    transposed: bool = False  # stored (in, out)
    ratio: list[int] = field(default_factory=list)  # rows to columns of the fused tensor, if names are ambiguous
    shared: bool = False  # one set of weights used by every layer
    optional: bool = False  # a file may lack it
    weight: str = ".weight"
    bias: str = ".bias"
    output_weight: str = ".weight"
    norm_weight: str = ".weight"
    norm_bias: str = ".bias"
    config: str | None = None  # the section of the config for this attention; a dot leads to a section of it
    of: str | None = None  # the model type of that section; where it has another, that type's architecture is read
    # Number of heads, or its config key, or "key / key" or "key / 64", the quotient
    heads: str | int | None = None
    head_dim: str = "head_dim"
    scale: str = "head_dim"  # factor on the scores: see positions/sequence.py
    softcap: str | None = None  # config key of c, where scores s become c·tanh(s/c)
    # The query's tensor also holds a gate for each head, behind its query; fused, all gates come before all queries
    gated: bool = False
    channel_groups: bool = False  # convolutions of width 1 in groups of channels, as many in as out
    values_behind: bool = False  # the key's tensor also holds the values, behind all keys
    # Where there are fewer queries than keys, they are the largest of those of several tokens, feature by feature:
    # on a "grid" of 2 × 2 tokens, or "strided" by the number of queries
    pool: str | None = None
    part: str = ""  # what it is called where a module has several, such as "global"
    window: str | None = None  # layers with a sliding window, without `layer_types`: see positions/sequence.py
    # Position term: "alibi", "t5", "clipped"; those of positions/relative.py; "unread": it is not read
    position: str = "none"
    # "half" or "interleaved" pairs; "half of axis": those of each axis; "unread": rotated in a way that is not read
    rope: str | None = None
    rope_kinds: list[str] = field(default_factory=list)  # kinds of layers (`layer_types`) with RoPE; none: all
    rotary_dim: str = "rotary_dim"  # config key of the number of rotated dimensions, if not a share; or the number
    norm_after_rope: bool = False  # queries and keys are rotated before they are normed
    rope_back: bool = False  # rotated by negative angles
    rope_last: bool = False  # the last dimensions of a head are rotated; they are read as the first
    # Of tokens on a grid (positions/grids.py): what parts of the pairs turn with ("time", "row", "column"), and `grid`
    axes: list[str] = field(default_factory=list)
    axes_share: bool = False  # the axes share one list of frequencies
    axes_alternate: bool = False  # the pairs of the axes alternate
    grid: dict[str, Any] = field(default_factory=dict)
    alibi: str | None = None  # config flag for ALiBi, scaled like the score, in place of RoPE
    norm_kind: str = "layer"  # or "rms"; "by shift": LayerNorm if it has a shift
    gain_offset: float = 0.0  # added to the stored gains
    qk_norm_kind: str = "rms"
    qk_norm_by_head: bool = False  # each head has gains of its own, and is normed by itself; ".0" names the first's
    unit_norm: str | None = None  # queries and keys are normed without a gain: "rms" or "l2"
    eps: float = 1e-6  # of all norms, if not in the config
    qk_norm_eps: float | None = None  # of the norms of queries and keys, if not that of the others
    latent_eps: float | None = None  # of the norms of MLA's latents, if not that of the others
    latent_scales: bool = False  # MLA's latents are scaled up by their widths, as in LongCat
    note: str | None = None  # what is not read
    only_if: dict[str, Any] = field(default_factory=dict)  # config values under which this applies
    kinds: list[str] = field(default_factory=list)  # kinds of layers (`layer_types`) to which it applies; none: all
    gaps: bool = False  # whether layers may have no such attention


@dataclass(frozen=True)
class Family:
    """An architecture: its attentions, its `model_type`s, and a tiny model for the equivalence test."""

    name: str
    model_types: list[str]
    attention: list[Attention]
    marks: list[str] = field(default_factory=list)  # substrings that tensor names of this architecture must contain
    gaps: bool = False  # whether layers may have no attention, or attention of another kind
    formless: str | None = None  # a part of the names of modules whose queries and keys meet in no softmax: a pattern
    by_names: bool = True  # whether it can be recognised without a config
    composite: bool = False  # whether its towers are read as the types of their sections of the config
    tiny: dict[str, Any] = field(default_factory=dict)

    def goes_by(self, model_type: Any) -> bool:
        """Whether a `model_type` is of this architecture; * is a wildcard."""
        return isinstance(model_type, str) and any(
            model_type == known or ("*" in known and fnmatchcase(model_type, known)) for known in self.model_types
        )


@dataclass(frozen=True)
class Location:
    """The location of one attention layer in a file: the full module name of every role present."""

    attention: Attention
    names: dict[str, str]
    layer: int
    prefix: str = ""
    wanted: dict[str, str] = field(default_factory=dict)  # likewise of missing roles, with suffixes

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


@cache
def families() -> dict[str, Family]:
    """All known architectures by name."""
    return {name: _family(name) for name in _texts()}


def families_of(model_type: Any) -> list[Family]:
    """The architectures that go by a `model_type`; files that cannot name it are not parsed."""
    if families.cache_info().currsize:
        return [family for family in families().values() if family.goes_by(model_type)]
    naming = [name for name, text in _texts().items() if f'"{model_type}"' in text or "*" in text]
    return [family for family in map(_family, naming) if family.goes_by(model_type)]


def composite() -> Family:
    """The architecture of models whose towers are read by the types of their sections of the config."""
    return families()["composite"] if families.cache_info().currsize else _family("composite")


@cache
def _texts() -> dict[str, str]:
    """The TOML files of all architectures by name."""
    entries = sorted(files("keyquery.checkpoints").joinpath("families").iterdir(), key=lambda file: file.name)
    tables = [file for file in entries if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in tables}


@cache
def _family(name: str) -> Family:
    return parse(name, tomllib.loads(_texts()[name]))


def parse(name: str, facts: Mapping[str, Any]) -> Family:
    """A Family from the tables of its TOML file."""
    attention = []
    for entry in facts["attention"]:
        names = entry["names"] if isinstance(entry["names"], list) else [entry["names"]]
        attention.append(Attention(**{**entry, "names": names}))
    rest = {key: value for key, value in facts.items() if key != "attention"}
    return Family(name=name, attention=attention, **rest)


def locations(family: Family, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> list[Location]:
    """Every attention layer in a file's tensor names: by kind, stack and layer."""
    located: dict[str, Location] = {}
    for attention, tower in _entries(family, tensors, config):
        own_config = section(config, attention.config)
        if any(own_config.get(key, value) != value for key, value in attention.only_if.items()):
            continue
        kinds = own_config.get("layer_types") if attention.kinds else None
        crossed = replace(attention, kind="cross")
        for location in _with_shared_keys(list(_locations_of(attention, tower)), own_config, crossed):
            if "reduction" in location.names:  # keys of fewer tokens than there are queries
                location = replace(location, attention=crossed)
            if isinstance(kinds, list) and location.layer < len(kinds) and kinds[location.layer] not in attention.kinds:
                continue
            # Of two entries for the same tensors, the later one wins.
            located[next(location.names[role] for role in ANCHORS if role in location.names)] = location
    return list(located.values())


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
                numbers = {"layer": layer, "previous": layer - 1, "last": max(stacks[prefix])}
                yield _location(names, prefix, numbers, attention, tensors)
        if matches:
            return


def gap(stacked: list[Location], tensors: Mapping[str, Any]) -> str | None:
    """A missing tensor: of a layer between two others, or the query of a key."""
    stacks: dict[tuple[int, str], list[Location]] = {}
    for location in stacked:
        stacks.setdefault((id(location.attention.names), location.prefix), []).append(
            location
        )  # also where kinds differ
    for stack in (stack for stack in stacks.values() if not stack[0].attention.gaps):
        layers = {location.layer for location in stack}
        one = stack[0]
        anchor = next(role for role in ANCHORS if role in one.wanted)
        names = next(names for names in one.attention.names if anchor in names and _stands(one, str(names[anchor])))
        keyed = layers | _keyed(one, names.get("key"), tensors)
        for layer in range(min(keyed), max(keyed) + 1):
            if layer not in layers:
                return one.prefix + str(names[anchor]).format(layer=layer) + one.attention.weight
    return None


def _stands(location: Location, pattern: str) -> bool:
    return (
        location.prefix + pattern.format(layer=location.layer) + location.attention.weight in location.wanted.values()
    )


def _keyed(one: Location, key: str | list[str] | None, tensors: Mapping[str, Any]) -> set[int]:
    """The layers that have a key, in the stack of a place."""
    if not isinstance(key, str) or "{layer}" not in key:
        return set()
    matches = map(_pattern(key, one.attention.weight).fullmatch, tensors)
    return {_number(match) for match in matches if match and match["prefix"] == one.prefix}


def _location(
    names: Mapping[str, str | list[str]],
    prefix: str,
    numbers: Mapping[str, int],
    attention: Attention,
    tensors: Mapping[str, Any],
) -> Location:
    """Full names of the roles whose tensors are present; `module` needs none."""
    filled: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for role, patterns in names.items():
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            name = prefix + pattern.format(**numbers)
            ending = "" if role in WHOLE else getattr(attention, ENDINGS[role]) if role in ENDINGS else ".weight"
            wanted.setdefault(role, name + ending)
            if role == "module" or name + ending in tensors:
                filled.setdefault(role, name.removesuffix(".") if role == "module" else name)
    return Location(attention, filled, numbers["layer"], prefix, wanted)


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
    layer = re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)")
    return re.compile(rf"(?P<prefix>(?:.+\.)?){layer}{re.escape(suffix)}")


def _number(match: re.Match[str]) -> int:
    """The layer number of a tensor, which must be in plain decimal: 7, not 07 or ٧."""
    digits = match.groupdict().get("layer", "0")
    if not LAYER.fullmatch(digits):
        raise ValueError(f"{match[0]!r} is a tensor of layer {digits[:20]!r}: expected a number such as 0 or 12")
    return int(digits)


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer.2 before layer.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
