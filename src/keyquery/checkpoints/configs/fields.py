"""Fields of configs that are not proven to be read.

Of a field that moves scores, a value that was not tried on tiny models, or was read wrongly, is not proven. Nor is a
field that the type's models did not have when they were tried, but in a config of an older transformers, whose newer
models do not look at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from keyquery.checkpoints.configs.types import Known, known, transformers_version

ROPE = ("rope_parameters", "rope_scaling")  # the same under its new and its old name
OLD_KINDS = {"su": "longrope", "mrope": "default"}  # of rotary positions, in older configs
# Fields of a name that no type's models read may be of a newer model: these words are those of attention.
ATTENTION = re.compile(
    r"attn|attention|rope|rotary|posit|alibi|window|chunk|sink|mask|heads?(?:_|$)|norm|eps|qk|quer|key|scal|multiplier"
    r"|temperature|softcap|logit_cap|kv|layer_types|pattern|latent"
)
# Of these, what says nothing of scores: how a model is run, trained or tokenised.
HARMLESS = re.compile(
    r"_?attn_implementation.*|use_flash_attn.*|flash_att\w*|.*_implementation|.*dropout.*|.*_prob|.*_?pdrop|.*initializer.*"
    r"|.*token.*|.*_loss.*|output_\w+|use_cache|cache_\w+|keys_to_ignore\w*|normalize_(?:embed|decision)\w*|.*hidden_states.*"
    r"|quantization_config|pruned_heads|masked?_(?:time|feature)\w*|apply_spec\w*|.*_max_?length|tie_\w+|max_position\w*"
    r"|.*gradient.*|.*classifier.*|.*label.*|lm_head\w*|.*projection_dim|.*layer_?drop|.*checkpoint\w*|logits?_scale\w*"
)
# What transformers takes in the config of any type, as it stood in older ones.
OLD = ("original_max_position_embeddings", "sliding_window_pattern", "_sliding_window_pattern", *ROPE)
NEW = "no field of its type when that was proven"
# Values that change nothing, in fields that a type's models do not have.
OFF: tuple[Any, ...] = (None, False, 0, 1, 1.0, "", [], {})


def known_types(config: Mapping[str, Any]) -> list[Known]:
    """What is known of the types of a config and of its sections."""
    return [known(section["model_type"]) for _, section in _sections(config)]


class Field(NamedTuple):
    """A field that moves scores, or may: its name, its value, and why it is not proven to be read, if it is not."""

    name: str
    value: Any
    unproven: str = ""

    def __str__(self) -> str:
        return f"{self.name} = {self.value!r:.60}{f' ({self.unproven})' if self.unproven else ''}"


def unproven_fields(config: Mapping[str, Any]) -> list[str]:
    """The fields of a config, and of its sections, that are not proven to be read, with the reason for each."""
    return [str(field) for field in score_fields(config) if field.unproven]


def score_fields(config: Mapping[str, Any]) -> Iterator[Field]:
    """The fields of a config, and of its sections, that move scores, or that no table knows."""
    is_old = _numbers(config.get("transformers_version")) <= _numbers(transformers_version())
    for path, section in _sections(config):
        for field in _fields(dict(flat(section)), known(section["model_type"])):
            if not (is_old and field.unproven == NEW):
                yield field._replace(name=f"{path}{field.name}")


def _numbers(version: Any) -> list[int]:
    """A version in numbers; one that is not stated is newer than all."""
    return [int(part) for part in re.findall(r"\d{1,6}", version)[:3]] if isinstance(version, str) else [1_000_000]


def flat(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields by name; those of rotary positions, of any kind of layer, and of untyped sections after a dot."""
    for name, value in section.items():
        if not isinstance(value, Mapping):
            yield name, value
        elif name in ROPE:
            for inner in ({k: v for k, v in value.items() if not isinstance(v, Mapping)}, *value.values()):
                if isinstance(inner, Mapping):
                    yield from (_rope_field(key, value) for key, value in inner.items())
        elif "model_type" not in value:
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())


def _rope_field(key: str, value: Any) -> tuple[str, Any]:
    """A field of rotary parameters under its present name, with the present name of its kind."""
    if key not in ("type", "rope_type"):
        return f"rope.{key}", value
    return "rope.rope_type", OLD_KINDS.get(value, value) if isinstance(value, str) else value


def _sections(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(config.get("model_type"), str):
        yield path, config
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sections(value, f"{path}{name}.")


def _fields(stated: Mapping[str, Any], facts: Known) -> Iterator[Field]:
    if facts.moves is None:
        return
    for name, value in stated.items():
        if name in facts.moves:
            allowed = facts.moves[name]
            fine = allowed is None or _all_in(value, allowed)
            yield Field(name, value, "" if fine else f"proven: {', '.join(map(repr, allowed or []))}")
        elif name not in (*facts.others, *OLD) and _of_attention(name) and value not in OFF:
            yield Field(name, value, NEW)
    for pair in facts.pairs:
        if all(name in stated and stated[name] == value for name, value in pair.items()):
            first, *rest = pair.items()
            yield Field(*first, "not with " + " and ".join(f"{name} = {value!r}" for name, value in rest))


def _all_in(value: Any, allowed: list[Any]) -> bool:
    """Whether a value, or every entry of a list, is among those that are proven."""
    if value in allowed or (value is False and None in allowed):  # a switch that is off is as one that is not there
        return True
    return isinstance(value, list) and bool(value) and all(entry in allowed for entry in value)


def _of_attention(name: str) -> bool:
    last = name.rpartition(".")[2]
    return name.startswith("rope.") or (ATTENTION.search(last) is not None and HARMLESS.fullmatch(last) is None)
