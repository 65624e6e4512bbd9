"""`read`: from whatever the user has, a path, a hub name or a live model, to Heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from keyquery.checkpoints.family import Attention, Family, families, places, recognise
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.live import FormedHeads, formed
from keyquery.checkpoints.sources import Live, Safetensors, Source, load_torch, read_index, read_json

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def read(
    source: str | Path | nn.Module,
    heads: int | None = None,
    query: str | None = None,
    key: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
) -> Heads:
    """The attention layers of a checkpoint or a live model; nothing but names and shapes is read yet.

    `source` is a Hugging Face folder, a .safetensors, .bin, .pt or .gguf file, the name of a hub model (org/name),
    or an nn.Module. A bare file without config needs `heads`. For an unknown family, `query` and `key` are the names
    of its weights with {layer} in them, such as "blocks.{layer}.q.weight". `config` stands in for a config.json.

    >>> heads = kq.read(torch.nn.MultiheadAttention(8, 2))
    >>> len(heads), heads.family.name
    (1, 'torch')
    """
    opened = _open(source, config)
    if isinstance(source, nn.Module) and not query and formed(source):
        return FormedHeads(opened, source)
    family = _custom(query, key) if query or key else _family_of(opened)
    return Heads(opened, family, heads)


def _open(source: str | Path | nn.Module, config: str | Path | Mapping[str, Any] | None) -> Source:
    if isinstance(source, nn.Module):
        return Live(source)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"source must be a path, a hub name or an nn.Module, got {type(source).__name__}")
    path = Path(source)
    if path.exists():
        return open_path(path, config)
    if isinstance(source, str) and HUB_NAME.fullmatch(source):
        from keyquery.checkpoints.hub import Hub

        return Hub(source)
    raise FileNotFoundError(f"{source} is neither a file, nor a folder, nor a hub model (org/name)")


def open_path(path: Path, config: str | Path | Mapping[str, Any] | None = None) -> Source:
    """A file, or the weights of a folder."""
    file = _weights_in(path) if path.is_dir() else path
    facts = _config(file.parent / "config.json" if config is None else config)
    label = str(path)
    if file.name.endswith(".index.json"):
        shards = read_index(file)
        if all(shard.suffix == ".safetensors" for shard in shards.values()):
            return Safetensors(shards, label, facts)
        raise ValueError(f"{file} names shards that are no safetensors; convert them first")
    if file.suffix == ".safetensors":
        return Safetensors({"": file}, label, facts)
    if file.suffix == ".gguf":
        from keyquery.checkpoints.gguf import Gguf

        return Gguf(file)
    if file.suffix in (".bin", ".pt", ".pth"):
        return load_torch(file, facts)
    raise ValueError(f"{file} is of no known kind: expected .safetensors, .bin, .pt, .gguf or a folder with these")


def _weights_in(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    for pattern in ("*.safetensors", "*.gguf", "*.bin", "*.pt"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder} holds several {pattern} files and no index; name one of them")
    raise FileNotFoundError(f"{folder} holds no weights: no .safetensors, .bin, .pt or .gguf file")


def _config(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    path = Path(given)
    return read_json(path) if path.is_file() else {}


def _family_of(source: Source) -> Family:
    said = source.config.get("model_type")
    for family in families().values():
        if family.goes_by(said) and places(family, source.shapes, source.config):
            return family
    recognised = recognise(source.shapes)
    if recognised is None:
        names = sorted(source.shapes)
        shown = ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")
        kind = f"the model type {said!r}" if said else "this layout"
        raise ValueError(
            f"{source.label}: {kind} is not known. It holds {shown or 'no tensors'}. Say where its weights are: "
            "--query PATTERN --key PATTERN --heads N, with {layer} in the patterns"
        )
    return recognised


def _custom(query: str | None, key: str | None) -> Family:
    if not query or not key:
        raise ValueError("query and key patterns go together")
    suffix = ".weight" if query.endswith(".weight") and key.endswith(".weight") else ""
    names: dict[str, str | list[str]] = {"query": query.removesuffix(suffix), "key": key.removesuffix(suffix)}
    return Family("custom", [], [Attention([names], weight=suffix)])
