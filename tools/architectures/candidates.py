"""What a softmax could be of: pairs of projections near it, and ways in which a config could say how they are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from keyquery.listening.products import Softmax
from keyquery.listening.softmaxes import Capture
from keyquery.proof.sizes import is_kind

QUERY_WORDS = {"q", "query", "queries", "wq", "toq", "query1"}
KEY_WORDS = {"k", "key", "keys", "wk", "tok"}
VALUE_WORDS = {"v", "value", "values", "wv"}
FUSED_WORDS = {"qkv", "c_attn", "wqkv", "in", "kqv", "qkvs"}
SHIFT = re.compile(r"(?:pos_)?bias_u|r_w_bias")  # what Transformer-XL adds to queries before they meet keys
ENDINGS = (".weight", "_weight", "")
TOWERS = {"text": ("text", "language", "llm", "decoder", "lm"), "vision": ("vision", "visual", "image", "vit")}
TOWERS |= {"audio": ("audio", "speech", "encoder"), "encoder": ("encoder",), "decoder": ("decoder",)}
TOWERS |= {"qformer": ("qformer",), "perceiver": ("perceiver", "resampler")}


@dataclass(frozen=True)
class Weight:
    """A weight on disk: its stem and ending, its module in memory, and its shape."""

    stem: str
    ending: str
    module: str
    shape: tuple[int, ...]

    @property
    def words(self) -> set[str]:
        """The words of the last parts of its name."""
        leaf = self.stem.removesuffix(".linear").split(".")[-1]
        return {*re.split(r"[_\d]+", leaf.lower()), leaf.lower()}

    def under(self, module: str) -> bool:
        """Whether it belongs to a module or to one inside it."""
        return self.module == module or self.module.startswith(f"{module}." if module else "")


def weights(shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, str]) -> list[Weight]:
    """All tensors on disk as weights of modules in memory."""
    known = []
    for name, shape in shapes.items():
        ending = next(ending for ending in ENDINGS if name.endswith(ending))
        if name in modules and (not name.endswith(("bias", "_scale")) or name.endswith(".q_bias")):
            known.append(Weight(name.removesuffix(ending), ending, modules[name], tuple(shape)))
    return known


def scope(event: Softmax, capture: Capture, known: list[Weight]) -> list[Weight]:
    """Weights of modules that ran before a softmax, under its owner, or beside it where it owns none."""
    around = event.owner
    for _ in range(3):
        near = [w for w in known if w.under(around) and capture.before(w.module, event.time) is not None]
        if any(len(w.shape) == 2 for w in near):
            return near
        if not around:
            break
        around = around.rpartition(".")[0]
    return []


Names = dict[str, str]


def projections(near: list[Weight]) -> Iterator[tuple[Names, dict[str, Any]]]:
    """Pairs of query and key weights, or a fused one, as names of roles and facts about them; likely ones first."""
    matrices = [w for w in near if len(w.shape) == 2]
    queries = [w for w in matrices if w.words & QUERY_WORDS and not w.words & (KEY_WORDS | VALUE_WORDS)]
    keys = [w for w in matrices if w.words & KEY_WORDS and not w.words & (QUERY_WORDS | VALUE_WORDS)]
    fused = [w for w in matrices if w.words & FUSED_WORDS or {"query", "key"} <= w.words]
    yield from _latent(near)
    shift = next(({"query_shift": w.stem} for w in near if SHIFT.fullmatch(w.stem.rpartition(".")[2])), {})
    shift |= next(({"query_bias": w.stem} for w in near if w.stem.endswith(".q_bias")), {})
    for query, key in product(queries, keys):
        yield from (({**names, **shift}, facts) for names, facts in _pair(query, key))
    for weight in fused or ([] if queries and keys else matrices):
        yield from _whole(weight)
    if not (queries and keys) and not fused:
        for query, key in product(matrices[:6], matrices[:6]):
            if query is not key:
                yield from _pair(query, key)


LATENT = {
    "query": ("q_proj",),
    "query_down": ("q_a_proj",),
    "query_latent_norm": ("q_a_layernorm",),
    "query_up": ("q_b_proj",),
    "key_down": ("kv_a_proj_with_mqa",),
    "key_latent_norm": ("kv_a_layernorm",),
    "key_up": ("kv_b_proj",),
}


def _latent(near: list[Weight]) -> Iterator[tuple[Names, dict[str, Any]]]:
    """Multi-head latent attention, as DeepSeek names its tensors."""
    leaves = {weight.stem.rpartition(".")[2]: weight.stem for weight in near}
    names = {role: leaves[leaf] for role, known in LATENT.items() for leaf in known if leaf in leaves}
    if {"key_down", "key_up"} <= set(names):
        yield names, {"order": "latent", "scale": "latent"}
        yield names, {"order": "latent", "scale": "latent", "latent_eps": 1e-6}


def _pair(query: Weight, key: Weight) -> Iterator[tuple[Names, dict[str, Any]]]:
    ending = (
        {} if query.ending == ".weight" else {"weight": query.ending, "bias": query.ending.replace("weight", "bias")}
    )
    if query.ending == key.ending:
        yield {"query": query.stem, "key": key.stem}, ending
        yield {"query": query.stem, "key": key.stem}, {**ending, "gated": True}


def _whole(weight: Weight) -> Iterator[tuple[Names, dict[str, Any]]]:
    ending = {} if weight.ending == ".weight" else {"weight": "_weight", "bias": "_bias"}
    names = {"fused": weight.stem}
    if weight.ending == "_weight" and weight.module == weight.stem.rpartition(".")[0]:  # nn.MultiheadAttention
        names["module"] = weight.module
    for order in ("blocks", "groups"):
        yield names, {**ending, "order": order}
        yield names, {**ending, "order": order, "transposed": True}


def qk_norms(near: list[Weight]) -> list[tuple[Names, dict[str, Any]]]:
    """Norms of queries and keys: none, by rms or LayerNorm, with gains stored as they are or less 1; without gains."""
    vectors = [w for w in near if (len(w.shape) == 1 and "norm" in w.stem.lower()) or "ln" in w.words]
    query = [w for w in vectors if any(word.startswith("q") for word in w.words)]
    key = [w for w in vectors if any(word.startswith("k") for word in w.words)]
    bare: list[tuple[Names, dict[str, Any]]] = [({}, {}), ({}, {"unit_norm": "rms"}), ({}, {"unit_norm": "l2"})]
    if not query or not key:
        return bare
    names = {"query_norm": query[0].stem, "key_norm": key[0].stem}
    kinds = product(("rms", "layer"), (0.0, 1.0))
    known = [(names, _known({"qk_norm_kind": kind, "gain_offset": offset})) for kind, offset in kinds]
    return known + bare + [(names, {**_known({"qk_norm_kind": kind}), "eps": 1e-5}) for kind in ("rms", "layer")]


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    defaults = {"qk_norm_kind": "rms", "gain_offset": 0.0}
    return {key: value for key, value in facts.items() if defaults.get(key) != value}


def sections(config: Mapping[Any, Any], owner: str, prefix: str = "") -> list[tuple[str, Mapping[Any, Any]]]:
    """The config and its sections, the likeliest for a module first."""
    parts = [(prefix, config)]
    for key, value in config.items():
        if isinstance(value, Mapping) and not key.startswith("rope") and "label" not in key:
            parts += sections(value, owner, f"{prefix}.{key}" if prefix else key)
    if prefix:
        return parts
    return sorted(parts, key=lambda item: -_affinity(item[0], owner))


def _affinity(section: str, owner: str) -> float:
    """How well the name of a section fits a module's name."""
    if not section:
        return 0.5
    path = owner.lower().split(".")
    fits = 0.0
    for word, names in TOWERS.items():
        if word in section:
            fits += 1.0 if any(name in part for name in names for part in path) else -0.5
    return fits


def head_keys(config: Mapping[Any, Any], owner: str) -> list[tuple[str, list[int]]]:
    """Config keys that could be the number of query heads, and their values: several where stages differ."""
    keys = []
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        numbers = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in counts)
        if numbers and is_kind("heads", key) and "key_value" not in key and "kv" not in key:
            keys.append((key, counts))
    usual = ("num_attention_heads", "n_head", "n_heads", "num_heads")

    def rank(item: tuple[str, list[int]]) -> tuple[bool, int]:
        word = item[0].split("_")[0]
        fits = word in ("encoder", "decoder") and word in owner.split(".")
        return not fits, usual.index(item[0]) if item[0] in usual else len(usual)

    return sorted(keys, key=rank)


def ropes(config: Mapping[Any, Any], normed: bool) -> list[dict[str, Any]]:
    """Rotations that a config could mean, before the norms of queries and keys or after them."""
    said = any("rope" in key or "rotary" in key for key in config)
    both: list[dict[str, Any]] = [{"rope": "half"}, {"rope": "interleaved"}, {"rope": "half", "rope_back": True}]
    both += [{"rope": "half", "norm_after_rope": True}] if said and normed else []
    if "patch_size" in config:  # tokens on a grid
        grid = {"grid": {"merge": "spatial_merge_size"}} if "spatial_merge_size" in config else {}
        both += [{"rope": kind, "axes": ["row", "column"], **grid} for kind in ("half", "interleaved")]
    return [*both, {}] if said else [{}, *both]


def scale_name(config: Mapping[Any, Any], value: float, usual: float) -> str | None:
    """How a config says a factor on the scores; `usual` is one over the root of a head's width."""
    if not value > 0:
        return None
    if abs(value - 1) < 1e-6:
        return "one"
    for key, number in config.items():
        if isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0:
            for how, meant in (("times", float(number)), ("root", float(number) ** -0.5), ("scaled", number * usual)):
                if abs(meant / value - 1) < 1e-6:
                    return f"{how} {key}"
    return None
