"""Which fields of a config a model reads, where, and which other values they can have."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from keyquery.support.extras import optional

# Classes of modules that make no scores: what these alone read is not varied.
ELSEWHERE = re.compile(
    r".*(?:MLP|Mlp|Experts?|Router|Gate|MoE|Moe|SparseBlock|SparseMoeBlock|FeedForward|FFN|Mixer|SSM|DeltaNet|LMHead|Head"
    r"|Pooler|Classifier|Quantizer|Codebook|Vocoder|Loss)\d?"
)
# What says nothing of attention, or only how large a model is.
SIZES = re.compile(
    r".*(?:vocab|dropout|drop_path|droprate|_drop$|pdrop|token_id|token_index|init|_std$|loss|labels?$|2label|num_hidden_layers"
    r"|num_layers|n_layers?$|^depths?$|(?:en|de)coder_layers|intermediate|inner|ffn|mlp|expert|router|hidden_act"
    r"|activation|_act$|use_cache|return_|output_|problem|tie_|chunk_size_feed|checkpoint|layerdrop|mask_(?:time|feature)"
    r"|apply_spec|gradient|architectures|torch_dtype|^dtype|quantiz|summary|classifier|num_labels|pad_|image_size"
    r"|num_channels|in_channels|mel|codebook|mamba_|ssm_|linear_(?:conv|num|key|value)|conv_|time_step|lru_|kda_|delta|lm_head|logit|upsample|quant|vq_|model_parallel|transformers_version).*"
)
WORDS = ("logit_softcapping", "attn_logit", "mask_token", "logit_scale_init")  # of the above, those that may matter
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
TYPES: dict[str, list[Any]] = {
    "position_embedding_type": ["absolute", "relative_key", "relative_key_query", "rotary", "rope", "nope", "alibi"],
    "pos_att_type": [["c2p"], ["p2c"], ["c2p", "p2c"], [], "p2c|c2p", "c2p|p2c"],
    "norm_type": ["rms_norm", "layer_norm"],
}


@contextmanager
def reads() -> Iterator[dict[tuple[str, str], set[str]]]:
    """Record which fields code of models reads: the config's type and the field, with the classes that read it."""
    base = optional("transformers", "fields").PretrainedConfig
    seen: dict[tuple[str, str], set[str]] = {}
    plain = base.__getattribute__

    def spy(config: Any, name: str) -> Any:
        frame = sys._getframe(1)
        module = frame.f_globals.get("__name__", "")
        if name[0] != "_" and re.search(r"modeling_(?!utils)|masking_utils|configuration_(?!utils)|rope", module):
            owner = frame.f_locals.get("self")
            reader = type(owner).__name__ if isinstance(owner, nn.Module) else frame.f_code.co_name
            if isinstance(owner, nn.Module) or name in plain(config, "__dataclass_fields__"):
                seen.setdefault((plain(config, "model_type"), name), set()).add(reader)
        return plain(config, name)

    base.__getattribute__ = spy
    try:
        yield seen
    finally:
        base.__getattribute__ = plain


def varied(seen: Mapping[tuple[str, str], set[str]], model_type: str) -> list[str]:
    """The fields that may move scores: read in attention, positions, masks, norms, or where a config derives others."""
    chosen = []
    for (kind, name), readers in seen.items():
        sized = SIZES.fullmatch(name) is not None and not any(word in name for word in WORDS)
        if kind == model_type and not sized and not all(ELSEWHERE.fullmatch(reader) for reader in readers):
            chosen.append(name)
    return sorted(chosen)


def alternatives(config: Any, name: str, heads: int, head_dim: int) -> list[Any]:
    """Other values of a field: booleans flipped, enumerations walked, numbers and lists changed."""
    value, values = getattr(config, name, None), [*TYPES.get(name, []), *_literals(type(config), name)]
    if isinstance(value, bool):
        values += [not value]
    elif isinstance(value, (int, float)):
        values += _numbers(name, value)
    elif isinstance(value, (list, tuple)):
        values += _lists(name, list(value))
    elif value is None:
        values += _unset(name, heads, head_dim)
    elif isinstance(value, Mapping) and name not in ROPE:
        values += [{**value, key: other} for key, inner in value.items() for other in _of_plain(str(key), inner)]
    if value is not None and not isinstance(value, (bool, Mapping)) and _may_be_none(type(config), name):
        values += [None]
    return [v for n, v in enumerate(values) if v != value and v not in values[:n]]


def rotations(config: Any, pairs: int) -> list[dict[str, Any]]:
    """Changes of rotary positions, as configs say them now and as they did before."""
    said = getattr(config, "rope_parameters", None)
    if not isinstance(said, Mapping):
        return []
    nested = {kind: inner for kind, inner in said.items() if isinstance(inner, Mapping)}
    base = {"rope_type": "default", "rope_theta": 10000.0} | ({} if nested else dict(said))
    short, long = [1.0 + 0.1 * n for n in range(pairs)], [2.0 + 0.5 * n for n in range(pairs)]
    ranges = {"original_max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, **ranges}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ranges}
    longrope = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 8.0}
    kinds: list[dict[str, Any]] = [
        {"rope_theta": 500.0},
        {"partial_rotary_factor": 0.5},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0},
        yarn,
        {**yarn, "mscale": 0.707, "mscale_all_dim": 1.0},
        {**yarn, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
        {**yarn, "truncate": False},
        llama3,
        {**longrope, **ranges},
        {**longrope, "original_max_position_embeddings": 8},
        {**longrope, **ranges, "short_mscale": 1.2, "long_mscale": 1.4},
    ]
    changes = [
        {"rope_parameters": {kind: {**base, **inner, **new} for kind, inner in nested.items()} or {**base, **new}}
        for new in kinds
    ]
    scaling = {"type": "linear", "factor": 2.0}
    before: list[dict[str, Any]] = [{"rope_theta": 700.0}, {"rope_theta": 700.0, "rope_scaling": scaling}]
    return changes + ([] if nested else before)


def _numbers(name: str, value: float) -> list[Any]:
    if isinstance(value, int) and "heads" in name:  # a width must be that of whole heads
        return [value * 2, *([value // 2] if value > 2 else [])]
    if isinstance(value, int):
        small = [value + 1, value - 1] if 0 < value < 8 else [value * 2, value // 2] if value else [1, 2]
        return [number for number in small if number >= 0]
    return [value * 2 + 0.1] + ([0.0] if value and not re.search("eps|multiplier|scal", name) else [])


def _lists(name: str, value: list[Any]) -> list[Any]:
    if not value:
        return []
    lists = [value[::-1], []]
    if re.search("layer|types|depth|heads|sizes|ratio", name):  # an entry for each layer or stage
        lists += [[value[0]] * len(value), [value[-1]] * len(value)]
    if set(map(str, value)) <= {"0", "1"}:
        lists += [[0] * len(value), [1] * len(value)]
    return lists


def _of_plain(name: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return _numbers(name, value)
    return _unset(name, 2, 8) if value is None else []


def _unset(name: str, heads: int, head_dim: int) -> list[Any]:
    """Values of a field that is None."""
    for words, values in (
        ("window", [4]),
        ("head_dim|kv_channels|d_kv|head_size", [2 * head_dim]),
        ("heads|n_kv", [heads, 1]),
        ("softcap|clip", [3.0]),
        ("scal|multiplier|temperature|factor|theta|base", [0.7, 300.0]),
        ("list|types|layers|pattern", [[0, 1] * 8, 2]),
    ):
        if re.search(words, name):
            return values
    return [True, 2]


def _literals(config: type, name: str) -> tuple[Any, ...]:
    """Words that a field may be, by its annotation and by what the code of the type compares it with."""
    words: list[Any] = []
    with suppress(Exception):
        words += _words_of(typing.get_type_hints(config).get(name))
    for comparisons in _compared(config.__module__.rpartition(".")[0]):
        words += comparisons.get(name, [])
    return tuple(dict.fromkeys(words))[:8]


def _words_of(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [word for inner in typing.get_args(hint) for word in _words_of(inner)]


def _may_be_none(config: type, name: str) -> bool:
    with suppress(Exception):
        return type(None) in typing.get_args(typing.get_type_hints(config).get(name))
    return False


@cache
def _compared(package: str) -> list[dict[str, list[str]]]:
    """By field, the words that it is compared with in each file of a type."""
    folder = Path(inspect.getfile(import_module(package))).parent
    return [_comparisons(file) for file in sorted(folder.glob("*.py")) if file.name.startswith(("modeling", "config"))]


def _comparisons(file: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            names = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            names |= {name for part in ast.walk(node) if (name := _asked(part)) is not None}
            words = [p.value for p in ast.walk(node) if isinstance(p, ast.Constant) and isinstance(p.value, str)]
            for name in names:
                found.setdefault(name, []).extend(word for word in words if word != name)
    return found


def _asked(node: ast.AST) -> str | None:
    """The name of a field that `getattr(config, name)` asks for."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "getattr":
        return None
    name = node.args[1] if len(node.args) > 1 else None
    return str(name.value) if isinstance(name, ast.Constant) else None
