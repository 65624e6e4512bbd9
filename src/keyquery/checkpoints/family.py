"""Architectures as data: where their files store queries and keys, and how the model uses them.

`families/` holds one small TOML file per architecture. Names are modules; `{layer}` is the layer's number, `{previous}`
that of the one before, `{last}` the last of the stack that is named. Any prefix may stand before a name, of which "../"
leaves the last module, but for a name that starts with "/". If disk and memory differ, `names` has two entries.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any


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
    chunk: str | None = None  # config key of the size of chunks, whose tokens see each other alone, in "chunked" layers
    # Position term: "alibi", "t5", "clipped"; those of positions/relative.py; "unread": it is not read
    position: str = "none"
    # "half" or "interleaved" pairs; "half of axis": those of each axis; "unread": rotated in a way that is not read
    rope: str | None = None
    rope_kinds: list[str] = field(default_factory=list)  # kinds of layers (`layer_types`) with RoPE; none: all
    rotary_dim: str = "rotary_dim"  # config key of the number of rotated dimensions, if not a share; or the number
    rope_alpha: bool = False  # "dynamic" scaling with an `alpha` stretches the base by it, whatever the length
    rope_factor: str | None = (
        None  # key of the rotary parameters for a factor on cosine and sine, in place of their own
    )
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
    norm_eps: float | None = None  # of the norm that feeds the layer, whatever the config says
    norm_unread: bool = False  # a norm feeds some of its layers, and is not read
    norm_factor: str | None = None  # config key of a factor on what that norm returns
    qk_norm_eps: float | None = None  # of the norms of queries and keys, if not that of the others
    latent_eps: float | None = None  # of the norms of MLA's latents, if not that of the others
    latent_scales: bool = False  # MLA's latents are scaled up by their widths, as in LongCat
    note: str | None = None  # what is not read
    only_if: dict[str, Any] = field(
        default_factory=dict
    )  # config values under which this applies; "unset": null, "set": any other
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
    ignored: list[str] = field(default_factory=list)  # tensors of attention modules that are of no score; # for numbers
    composite: bool = False  # whether its towers are read as the types of their sections of the config
    tiny: dict[str, Any] = field(default_factory=dict)

    def goes_by(self, model_type: Any) -> bool:
        """Whether a `model_type` is of this architecture; * is a wildcard."""
        return isinstance(model_type, str) and any(
            model_type == known or ("*" in known and fnmatchcase(model_type, known)) for known in self.model_types
        )


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
    attention: list[Attention] = []
    for entry in facts["attention"]:
        attention.append(Attention(**_whole(entry, name, attention)))
    rest = {key: value for key, value in facts.items() if key != "attention"}
    return Family(name=name, attention=attention, **rest)


def _whole(entry: Mapping[str, Any], own_family: str, earlier: list[Attention]) -> dict[str, Any]:
    """All facts of an entry: `like = "bart 1"` takes those of the second entry of `bart`, with names `under` a prefix.

    What the entry states itself comes first; a name that is "" is left out.
    """
    own = {key: value for key, value in entry.items() if key not in ("like", "under", "names")}
    stated = entry.get("names", {})
    if "like" not in entry:
        return {**own, "names": stated if isinstance(stated, list) else [stated]}
    family, _, index = entry["like"].partition(" ")
    model = (earlier if family == own_family else _family(family).attention)[int(index or 0)]
    facts = {field.name: getattr(model, field.name) for field in fields(model) if field.name not in own}
    under = entry.get("under", "")
    names = [{role: _under(under, name) for role, name in table.items()} for table in model.names]
    if isinstance(stated, list):
        names = stated
    elif stated:
        names = [{role: n for role, n in (table | stated).items() if n or role not in stated} for table in names]
    return {**facts, **own, "names": names}


def _under(prefix: str, name: str | list[str]) -> str | list[str]:
    return prefix + name if isinstance(name, str) else [prefix + part for part in name]
