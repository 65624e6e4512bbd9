"""Which tensors of a composite model belong to which section of its config, by the words in their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Words for the same tower.
SYNONYMS = (("vision", "visual", "image", "vit", "img"), ("audio", "speech", "sound"), ("text", "language", "llm"))
LANGUAGE = ("text", "llm", "language", "decoder")  # sections to which unmarked names belong


def towers(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tensors of each section that has a model type of its own."""
    sections = [key for key, value in config.items() if isinstance(value, Mapping) and "model_type" in value]
    owned: dict[str, dict[str, Any]] = {key: {} for key in sections}
    unmarked: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key = _section(name, sections)
        (unmarked if key is None else owned[key])[name] = tensor
    language = next((key for stem in LANGUAGE for key in sections if key.startswith(stem)), None)
    if language is not None and not owned[language]:
        owned[language] = unmarked
    return owned


def _section(name: str, sections: list[str]) -> str | None:
    """The section whose word comes first in a tensor's name; of two, the longer word."""
    for part in name.split("."):
        lengths = {
            key: max((len(word) for word in _words(key) if part.startswith(word)), default=0) for key in sections
        }
        key = max(lengths, key=lengths.__getitem__, default=None)
        if key is not None and lengths[key]:
            return key
    return None


def _words(section: str) -> tuple[str, ...]:
    stem = section.removesuffix("_config")
    return (stem, *next((words for words in SYNONYMS if stem.split("_")[0] in words), ()))
