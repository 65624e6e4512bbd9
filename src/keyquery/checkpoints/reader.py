"""`read`: Heads from a path, a hub name or a live model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyquery.checkpoints.configs.defaults import completed
from keyquery.checkpoints.configs.fields import known_types, unproven_fields
from keyquery.checkpoints.coverage import formless, listed, uncovered, unread_tensors
from keyquery.checkpoints.custom import custom_family, example, likely_pair, meant, shown
from keyquery.checkpoints.family import Family, composite, families_of
from keyquery.checkpoints.formats.adapters import Adapted, adapted_name, load_adapter
from keyquery.checkpoints.formats.llama2c import open_llama2c
from keyquery.checkpoints.formats.quantised.source import dequantised
from keyquery.checkpoints.has_form import FormedHeads, MixedHeads, formed
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.hub import HUB_NAME, Hub, cached, full_names
from keyquery.checkpoints.locations import locations, recognise
from keyquery.checkpoints.sources import (
    Live,
    Safetensors,
    Source,
    Tower,
    bare,
    load_torch,
    read_index,
    read_json,
    with_usual_names,
)
from keyquery.support.devices import pick_device
from keyquery.support.extras import optional
from keyquery.support.files import beside
from keyquery.support.printable import NAME, printable

CONFIGS = ("config.json", "open_clip_config.json")
TORCH = (".bin", ".pt", ".pth")
REASONS = 400  # letters of what is not read, in a message
NAMED = (
    "weights named by patterns: scale 1/√r is assumed, norms and positions are not known, every key counts as visible"
)


def read(
    source: str | Path | nn.Module,
    heads: int | None = None,
    query: str | None = None,
    key: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    layout: str | None = None,
    adapter: str | Path | None = None,
    partial: bool = False,
    unproven: bool = False,
    device: Any = None,
) -> Heads:
    """Open the attention heads of a checkpoint or a live model; weights are loaded lazily.

    Parameters
    ----------
    source
        A Hugging Face folder, a .safetensors, .bin, .pt or .gguf file, a hub model (org/name), or an nn.Module.
    heads
        Number of heads; needed for a file without config. Default: from the config.
    query, key
        For an unknown architecture: names of its weights, such as "blocks.{layer}.q.weight".
    config
        In place of config.json: a path or a mapping.
    layout
        Storage of `query` and `key`: "linear" (heads·r, d), "transposed" (d, heads·r), "heads" (heads, d, r), "columns"
        (d, heads, r) or "heads-linear" (heads, r, d); or of one tensor `query` without `key`: "fused" (3·heads·r, d),
        "fused-transposed" or "fused-heads". Default: "linear" for matrices.
    adapter
        A folder of PEFT with a LoRA adapter, which is added to the weights as they are read. Default: none.
    partial
        Read a file of which some attention modules cannot be read; every layer says so. Default: refuse it.
    unproven
        Read a file although its config, or a tensor of its attention, holds something that moves scores and is not
        proven to be read; every layer says so. Default: refuse it.
    device
        Where layers are read to, such as "cuda". Default: the CPU, or where the weights of a live model are.

    Returns
    -------
    Heads
        A sequence of layers; each gives Forms, norms, biases and positions.

    Raises
    ------
    FileNotFoundError
        If `source` is neither a file, nor a folder, nor a hub model.
    ValueError
        If the architecture is unknown and `query` and `key` are not set, if it is proven to be read wrongly, if
        attention modules are not read and `partial` is not set, or if a field of its config or a tensor that may move
        scores is not read and `unproven` is not set.

    See Also
    --------
    kq.look : the analysis of all heads of a model.

    Examples
    --------
    >>> heads = kq.read(torch.nn.MultiheadAttention(8, 2))
    >>> len(heads), heads.family.name
    (1, 'torch')
    """
    target = None if device is None else torch.device(pick_device(device))
    adapted_name(source, adapter)  # raises for a live model with one
    source = bare(source) if isinstance(source, nn.Module) else source
    opened = _open(source, config)
    opened = opened if isinstance(source, nn.Module) else _adapted(dequantised(opened), adapter)
    if query or key:
        read_heads = _named(opened, heads, query, key, layout)
    elif isinstance(source, nn.Module) and (own_layers := formed(source)):
        read_heads = FormedHeads(opened, source)
        rest = Live(source, without=own_layers)
        if (family := _family_by_type(rest) or recognise(rest.shapes)) is not None:
            read_heads = MixedHeads(read_heads, Heads(rest, family, heads, gaps=True))
    elif layout is not None:
        raise ValueError(f"layout needs query and key, got layout {layout!r} without them")
    else:
        read_heads = read_recognised(opened, heads, partial, unproven)
    read_heads.device = target
    return read_heads


def _named(opened: Source, heads: int | None, query: str | None, key: str | None, layout: str | None) -> Heads:
    """Heads of an unknown architecture, whose weights are named by patterns."""
    family = custom_family(opened, query, key, layout)
    if not locations(family, opened.shapes, opened.config):
        raise ValueError(f"{opened.label} has no tensor {query!r}; it holds {shown(opened)}{meant(opened, query)}")
    return Heads(opened, family, heads, (NAMED,), gaps=True)


def read_recognised(
    opened: Source, heads: int | None = None, partial: bool = False, unproven: bool = False, trusted: bool = False
) -> Heads:
    """Heads of a source whose architecture is recognised; `trusted`: as if that were proven, to prove it."""
    if _family_by_type(opened) is None:
        _check_supported(opened)
    tower, tower_notes = (opened, ()) if _composite(opened) else _language_tower(opened)
    family = _family_of(tower)
    unknown = () if trusted else _unknown_type(tower, family)
    located = locations(family, tower.shapes, tower.config)
    unread = []
    if not trusted:
        unread += [] if unknown else [f"the config's {reason}" for reason in unproven_fields(opened.config)]
        proven = {*family.ignored, *(pattern for facts in known_types(tower.config) for pattern in facts.tensors)}
        tensors = unread_tensors(tower.shapes, located, proven)
        unread += [f"{listed(tensors)} of its attention"] if tensors else []
    notes = _unread(opened, unread, unproven)
    notes += (*unknown, *tower_notes, *_partial(opened, tower, family, partial), *formless(tower.shapes, located))
    gaps = bool(unknown) or trusted or partial or family.gaps
    return Heads(tower, family, heads, notes, gaps=gaps, positions=not unknown)


def _unread(source: Source, reasons: list[str], allowed: bool) -> tuple[str, ...]:
    """Notes on what may move scores and is not read, which must be allowed."""
    if reasons and not allowed:
        unread = printable("; ".join(reasons), REASONS)
        raise ValueError(
            f"{source.label}: its scores would be read without {unread}. To read it all the same, labelled: "
            "unproven=True (--unproven); keyquery prove tests a config"
        )
    return tuple(f"unproven: {printable(reason, REASONS)} is not read" for reason in reasons)


def _adapted(source: Source, adapter: str | Path | None) -> Source:
    """The source with an adapter, if there is one."""
    if adapter is None:
        return source
    if str(source.config.get("model_type")).startswith(("gguf-", "llama2.c")):
        raise ValueError(
            f"{source.label} orders its rows otherwise than an adapter: read the adapter with the original"
        )
    return Adapted(source, load_adapter(adapter))


def _open(source: str | Path | nn.Module, config: str | Path | Mapping[str, Any] | None) -> Source:
    if isinstance(source, nn.Module):
        return Live(source)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"source must be a path, a hub name or an nn.Module, got {type(source).__name__}")
    path = Path(source)
    if path.exists():
        return open_path(path, config)
    local = path.suffix in (".safetensors", ".gguf", *TORCH) or Path(path.parts[0]).is_dir()
    if isinstance(source, str) and HUB_NAME.fullmatch(source) and not local:
        if (folder := cached(source)) is not None:
            return open_path(folder, config, label=source)
        optional("huggingface_hub", "a hub model")  # before any network access
        return with_usual_names(Hub(source))
    meant = full_names(str(source)) if len(path.parts) == 1 else []
    hint = f"; did you mean {' or '.join(meant[:3])}?" if meant else ""
    raise FileNotFoundError(f"{source} is neither a file, nor a folder, nor a hub model (org/name){hint}")


def open_path(path: Path, config: str | Path | Mapping[str, Any] | None = None, label: str | None = None) -> Source:
    """Open a file, or the weights of a folder; `label` is its name in messages. Default label: the path."""
    file = weights_in(path) if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"{file} is a link to a file that does not exist")
    if not file.is_file():
        raise ValueError(f"{file} is a device or a pipe, not a file")
    near = next((beside(file.parent, name) for name in CONFIGS if beside(file.parent, name).is_file()), None)
    facts = _config(config) if config is not None else {} if near is None else read_json(near)
    facts, label = completed(facts), label or str(path)
    if file.name.endswith(".index.json"):
        return with_usual_names(_sharded(file, label, facts))
    if file.suffix == ".safetensors":
        return with_usual_names(Safetensors({"": file}, label, facts))
    if file.suffix == ".gguf":
        from keyquery.checkpoints.formats.gguf import Gguf

        return Gguf(file)
    if file.suffix == ".bin" and (llama2c := open_llama2c(file)) is not None:
        return llama2c
    if file.suffix in TORCH:
        return with_usual_names(load_torch([file], label, facts))
    raise ValueError(f"{file} has an unknown file type: expected .safetensors, .bin, .pt, .gguf or a folder with these")


def _sharded(index: Path, label: str, config: Mapping[str, Any]) -> Source:
    shards = read_index(index)
    suffixes = {shard.suffix for shard in shards.values()}
    source: Source
    if suffixes == {".safetensors"}:
        source = Safetensors(shards, label, config)
    elif suffixes and suffixes <= set(TORCH):
        source = load_torch(dict.fromkeys(shards.values()), label, config)
    else:
        raise ValueError(f"{index} must name safetensors or torch files, got {', '.join(sorted(suffixes)) or 'none'}")
    absent = [name for name in shards if name not in source.shapes]
    if absent:
        raise ValueError(f"{index} names {printable(absent[0], NAME)}, which {shards[absent[0]].name} does not hold")
    return source


def weights_in(folder: Path) -> Path:
    """The weights file of a folder, or its index."""
    whole = ("model.safetensors", "pytorch_model.bin")
    for name in (name for file in whole for name in (f"{file}.index.json", file)):
        if beside(folder, name).is_file():
            return folder / name
    for pattern in ("*.safetensors", "*.gguf", "*.bin", "*.pt"):
        files = sorted(folder.glob(pattern))
        if len(files) == 1:
            return beside(folder, files[0].name)
        if files:
            raise ValueError(f"{folder} holds several {pattern} files and no index; pass one of them")
    raise FileNotFoundError(f"{folder} holds no weights: no .safetensors, .bin, .pt or .gguf file")


def _config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not Path(config).is_file():
        raise FileNotFoundError(f"config must be a JSON file, and {config} is not a file")
    return read_json(Path(config))


def _language_tower(source: Source) -> tuple[Source, tuple[str, ...]]:
    """The language tower of a multimodal model whose towers no architecture names, with a note."""
    model_type, text = source.config.get("model_type"), source.config.get("text_config")
    known = families_of(model_type)
    sectioned = any(family.composite or any(entry.config for entry in family.attention) for family in known)
    if not isinstance(text, Mapping) or sectioned:
        return source, ()
    if known:  # the only tower with attention
        return Tower(source, text), ()
    return Tower(source, text), ("the language tower only",)


def _composite(source: Source) -> Family | None:
    """The architecture of a model whose towers are all of known types."""
    family = composite()
    if _family_by_type(source) is not None or isinstance(source, Live):
        return None
    covering = locations(family, source.shapes, source.config)
    return family if covering and not uncovered(source.shapes, covering) else None


def _unknown_type(source: Source, family: Family) -> tuple[str, ...]:
    """A note if the model type of the config is not known to be read exactly as this architecture."""
    model_type = source.config.get("model_type")
    if model_type is None or family.goes_by(model_type):
        return ()
    why = "does not fit its tensors" if families_of(model_type) else "is not known"
    return (
        f"unproven: model type {_quoted(model_type)} {why}: read as {family.name} by its tensor names; scale and norms "
        "may differ, and positions are left out",
    )


def _partial(whole: Source, source: Source, family: Family, allowed: bool) -> tuple[str, ...]:
    """A note if attention modules of a file are not read, which must be allowed."""
    if isinstance(whole, Live):
        return ()
    left = uncovered(whole.shapes, locations(family, source.shapes, source.config), source.config, family.formless)
    if not left:
        return ()
    count = f"{len(left)} attention module{'s are' if len(left) > 1 else ' is'} not read"
    if not allowed:
        raise ValueError(
            f"{whole.label}: {count} as {family.name}: {listed(left)}. To read the rest: partial=True (--partial)"
        )
    return (f"partial: {count}: {listed(left)}",)


def _family_by_type(source: Source) -> Family | None:
    model_type = source.config.get("model_type")
    return next((family for family in families_of(model_type) if locations(family, source.shapes, source.config)), None)


@cache
def _refused() -> dict[str, str]:
    """Model types that are known not to be read, and why."""
    reasons: dict[str, str] = tomllib.loads(files("keyquery.checkpoints").joinpath("refused.toml").read_text("utf-8"))
    return reasons


def _check_supported(source: Source) -> None:
    """Raise if the model type is known to be read wrongly."""
    model_type = source.config.get("model_type")
    if isinstance(model_type, str) and model_type in _refused():
        raise ValueError(
            f"{source.label}: the model type {_quoted(model_type)} is not supported: {_refused()[model_type]}"
        )


def _family_of(source: Source) -> Family:
    model_type = source.config.get("model_type")
    if (family := _family_by_type(source) or _composite(source)) is not None:
        return family
    _check_supported(source)
    if isinstance(model_type, str) and model_type.startswith("gguf-"):
        raise ValueError(f"{source.label} is a GGUF file without attention layers: it holds {shown(source)}")
    recognised = recognise(source.shapes)
    if recognised is None:
        kind = f"the model type {_quoted(model_type)}" if model_type else "this layout"
        if isinstance(source, Live):
            query, key = likely_pair(source) or ("…", "…")
            raise ValueError(
                f"{source.label} has no known attention module: it holds {shown(source)}; if it has attention, pass "
                f"query={query!r}, key={key!r} and heads= to kq.read or kq.look"
            )
        if all(name.startswith("network.") for name in source.shapes):
            kind += " (a saved estimator? then load it, and pass its network_)"
        raise ValueError(
            f"{source.label}: {kind} is not known. It holds {shown(source)}. Name its weights{example(source)}"
        )
    return recognised


def _quoted(value: Any) -> str:
    """A value of a config, safe to print in a message."""
    return printable(repr(value), NAME)
