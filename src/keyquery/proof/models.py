"""Tiny random models of any config type of transformers."""

from __future__ import annotations

import math
import pkgutil
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch

from keyquery.proof.sizes import shrink
from keyquery.support.extras import optional

FACTORS = (16, 8, 4, 2, 1)
MAX_PARAMETERS = 40_000_000  # parameters of a tiny model
DERIVED: tuple[str, ...] = (
    "stage_names",
    "out_features",
    "out_indices",
    "id2label",
    "label2id",
    "_attn_implementation",
    "dtype",
)
DERIVED += ("transformers_version", "architectures", "_name_or_path")


class CannotBuildError(Exception):
    """No tiny model of a type can be made here."""


@cache
def overrides() -> dict[str, dict[str, Any]]:
    """Per config type, what the general rule does not find: `config`, `inputs`, `model`…; see tiny.toml."""
    text = files("keyquery.proof").joinpath("tiny.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def model_types() -> list[str]:
    """All config types of the installed transformers."""
    auto = optional("transformers.models.auto.configuration_auto", "prove")
    return list(auto.CONFIG_MAPPING_NAMES)


def tiny_configs(source: str | Mapping[Any, Any]) -> Iterator[Any]:
    """Small configs of a type, or of a config's own values, the smallest first."""
    transformers = optional("transformers", "prove")
    facts = dict(source) if isinstance(source, Mapping) else {}
    model_type = str(facts.get("model_type")) if facts else str(source)
    known = overrides().get(model_type, {})
    if model_type not in transformers.CONFIG_MAPPING:
        near = get_close_matches(model_type, model_types(), 3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise CannotBuildError(f"transformers {transformers.__version__} has no config type {model_type!r}{meant}")
    cls = transformers.CONFIG_MAPPING[model_type]
    reasons = []
    try:
        start = cls(**facts) if facts else cls(**known.get("start", {}))
    except Exception as error:
        raise CannotBuildError(f"its default config: {brief(error)}") from error
    for factor in [known["factor"]] if "factor" in known else FACTORS:
        try:
            small = shrink(_bare(start.to_dict()), factor)
            yield cls(**_merged(small, known.get("config", {})))
        except Exception as error:
            reasons.append(f"a config {factor} times smaller: {brief(error)}")
    if reasons:
        raise CannotBuildError(reasons[0])


def build(config: Any) -> Any:
    """A model of a config with random weights and transformers' eager attention, unless tiny.toml names another."""
    cls = model_class(config)
    _set_attention(config, overrides().get(config.model_type, {}).get("attention", "eager"))
    try:
        with torch.device("meta"):
            sizes = sum(p.numel() for p in _instance(cls, config).parameters())
    except (RuntimeError, NotImplementedError):  # tensors that need values
        sizes = 0
    if sizes > MAX_PARAMETERS:
        raise CannotBuildError(f"it has {sizes / 1e6:.0f} million parameters at its smallest")
    torch.manual_seed(0)
    model = _instance(cls, config).eval()
    randomise(model)
    return model


def _instance(cls: Any, config: Any) -> Any:
    return cls(config) if cls.__name__ != "AutoModel" else cls.from_config(config)


def _set_attention(config: Any, kind: str | Mapping[str, str]) -> None:
    """Set the implementation of a config and its sections; a mapping names those of sections that are not eager."""
    whole = kind if isinstance(kind, str) else "eager"
    config._attn_implementation = whole
    config._experts_implementation = "eager"
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None and hasattr(part, "to_dict"):
            _set_attention(part, whole if isinstance(kind, str) else kind.get(name, whole))


def model_class(config: Any) -> Any:
    """The class of models of a config: as AutoModel has it, or else the one in its module that takes this config."""
    transformers = optional("transformers", "prove")
    known = overrides().get(config.model_type, {})
    if "model" in known:
        return getattr(transformers, known["model"])
    if type(config) in transformers.MODEL_MAPPING:
        mapped = transformers.MODEL_MAPPING[type(config)]
        return mapped[0] if isinstance(mapped, tuple) else mapped
    for mapping in ("MODEL_FOR_PRETRAINING_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"):
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, mapping)[type(config)]
    classes = list(_classes_of(type(config)))
    if not classes:
        raise CannotBuildError(f"transformers has no model class of {type(config).__name__}")
    stem = type(config).__name__.removesuffix("Config")
    return min(
        classes, key=lambda cls: (cls.__name__ != f"{stem}Model", "Model" not in cls.__name__, len(cls.__name__))
    )


def _classes_of(config: type) -> Iterator[Any]:
    package = import_module(config.__module__.rpartition(".")[0])
    base = optional("transformers", "prove").PreTrainedModel
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name.startswith("modeling_")]
    for module in (import_module(f"{package.__name__}.{name}") for name in names):
        for value in vars(module).values():
            if not isinstance(value, type) or not issubclass(value, base) or value.__module__ != module.__name__:
                continue
            taken = vars(value)["__init__"].__annotations__.get("config") if "__init__" in vars(value) else None
            named = value.__name__ == config.__name__.replace("Config", "Model")
            fits = getattr(value, "config_class", None) is config or taken in (config, config.__name__) or named
            if fits and "PreTrained" not in value.__name__:
                yield value


def randomise(model: Any) -> None:
    """Random weights of a size that keeps scores near 1, also of biases and gains."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fixed = not parameter.requires_grad and bool(parameter.isfinite().all())  # tables of sines
            if fixed or not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            if parameter.ndim < 2 or parameter.numel() == max(parameter.shape):
                start = parameter.nan_to_num(0.0, 0.0, 0.0)
                parameter.copy_(start.clamp(-5, 5) + 0.2 * noise)
            else:
                inside = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
                parameter.copy_(noise * (0.5 if "embed" in name.lower() else 1 / math.sqrt(inside)))


def _bare(facts: Mapping[Any, Any]) -> dict[str, Any]:
    """Without what a config derives from the rest; the stages of convolutional backbones stay."""
    staged = any(key in facts for key in ("depths", "stage_num_blocks", "stage_out_channels"))
    return {
        key: _bare(value) if isinstance(value, Mapping) else value
        for key, value in facts.items()
        if (key not in DERIVED or (staged and key in ("out_features", "out_indices")))
        and not str(key).startswith("_out")
    }


def _merged(facts: dict[str, Any], changes: Mapping[Any, Any]) -> dict[str, Any]:
    merged = dict(facts)
    for key, value in changes.items():
        inner = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(dict(merged[key]), value) if inner else None if value == "none" else value
    return merged


def sparse(config: Any) -> dict[str, Any]:
    """The fewest values of a config from which its class makes the same one, as files on the hub hold them."""
    whole: dict[str, Any] = config.to_dict()
    kept: dict[str, Any] = {}
    nested = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    sections = {key: sparse(section) for key, section in nested.items() if hasattr(section, "to_dict")}
    for _ in range(5):
        again = type(config)(**sections, **kept).to_dict()
        differing = {k: v for k, v in whole.items() if k not in sections and (k not in again or again[k] != v)}
        if not differing.keys() - kept.keys():
            break
        kept |= differing
    return {**kept, **sections, "model_type": config.model_type}


def brief(error: BaseException) -> str:
    """An error as one short line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])
    return f"{type(error).__name__}: {text[:160]}"
