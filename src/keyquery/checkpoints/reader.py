"""`read`: from whatever the user has, a path, a hub name or a live model, to Heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from keyquery.checkpoints.custom import custom_family
from keyquery.checkpoints.family import Family, families, places, recognise
from keyquery.checkpoints.formats.llama2c import open_llama2c
from keyquery.checkpoints.has_form import FormedHeads, MixedHeads, formed
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.remote.cache import HUB_NAME, cached, full_names
from keyquery.checkpoints.sources import Live, Safetensors, Source, Tower, bare, load_torch, read_index, read_json
from keyquery.support.extras import optional
from keyquery.support.files import beside
from keyquery.support.printable import NAME, printable

TORCH = (".bin", ".pt", ".pth")


def read(
    source: str | Path | nn.Module,
    heads: int | None = None,
    query: str | None = None,
    key: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    layout: str | None = None,
) -> Heads:
    """The attention layers of a checkpoint or a live model; nothing but names and shapes is read yet.

    `source` is a Hugging Face folder, a .safetensors, .bin, .pt or .gguf file, the name of a hub model (org/name),
    or an nn.Module. A bare file without config needs `heads`. For an unknown family, `query` and `key` are the names
    of its weights with {layer} in them, such as "blocks.{layer}.q.weight", and `layout` is how they are stored:
    "linear" (heads·r, d), the default for matrices, "transposed" (d, heads·r), "heads" (heads, d, r), "heads-linear"
    (heads, r, d), or of one tensor named by `query` alone "fused" (3·heads·r, d), "fused-transposed" and "fused-heads".
    `config` stands in for a config.json.

    >>> heads = kq.read(torch.nn.MultiheadAttention(8, 2))
    >>> len(heads), heads.family.name
    (1, 'torch')
    """
    source = bare(source) if isinstance(source, nn.Module) else source
    opened = _open(source, config)
    if isinstance(source, nn.Module) and not query and not key and (said := formed(source)):
        rest = Live(source, without=said)
        family = _family_by_type(rest) or recognise(rest.shapes)
        own = FormedHeads(opened, source)
        return own if family is None else MixedHeads(own, Heads(rest, family, heads, gaps=True))
    if query or key:
        family = custom_family(opened, query, key, layout, heads)
        if not places(family, opened.shapes, opened.config):
            raise ValueError(f"{opened.label} has no tensor {query!r}; it holds {_shown(opened)}")
        return Heads(opened, family, heads, gaps=True)
    if layout is not None:
        raise ValueError(f"layout is of weights that query and key name, got {layout!r} without these")
    opened, notes = _language_tower(opened)
    family = _family_of(opened)
    strange = _strangeness(opened, family)
    return Heads(opened, family, heads, (*notes, *strange), gaps=bool(strange))


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
        optional("huggingface_hub", "a hub model")  # before the network is asked
        from keyquery.checkpoints.remote.hub import Hub

        return Hub(source)
    meant = full_names(str(source)) if len(path.parts) == 1 else []
    hint = f"; did you mean {' or '.join(meant[:3])}?" if meant else ""
    raise FileNotFoundError(f"{source} is neither a file, nor a folder, nor a hub model (org/name){hint}")


def open_path(path: Path, config: str | Path | Mapping[str, Any] | None = None, label: str | None = None) -> Source:
    """A file, or the weights of a folder; `label` is what it is called in messages, by default its path."""
    file = weights_in(path) if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is a device or a pipe; name a file")
    near = beside(file.parent, "config.json")
    facts = _config(config) if config is not None else read_json(near) if near.is_file() else {}
    label = label or str(path)
    if file.name.endswith(".index.json"):
        return _sharded(file, label, facts)
    if file.suffix == ".safetensors":
        return Safetensors({"": file}, label, facts)
    if file.suffix == ".gguf":
        from keyquery.checkpoints.formats.gguf import Gguf

        return Gguf(file)
    if file.suffix == ".bin" and (found := open_llama2c(file)) is not None:
        return found
    if file.suffix in TORCH:
        return load_torch([file], label, facts)
    raise ValueError(f"{file} is of no known kind: expected .safetensors, .bin, .pt, .gguf or a folder with these")


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
        raise ValueError(f"{index} names {absent[0]}, which {shards[absent[0]].name} does not hold")
    return source


def weights_in(folder: Path) -> Path:
    """The file that a folder's model is read from: an index, or its weights.

    >>> weights_in(kq.models.DECODER).name
    'model.safetensors'
    """
    whole = ("model.safetensors", "pytorch_model.bin")
    for name in (name for file in whole for name in (f"{file}.index.json", file)):
        if beside(folder, name).is_file():
            return folder / name
    for pattern in ("*.safetensors", "*.gguf", "*.bin", "*.pt"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return beside(folder, found[0].name)
        if found:
            raise ValueError(f"{folder} holds several {pattern} files and no index; name one of them")
    raise FileNotFoundError(f"{folder} holds no weights: no .safetensors, .bin, .pt or .gguf file")


def _config(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    if not Path(given).is_file():
        raise FileNotFoundError(f"config must be a JSON file, got {given}, which is none")
    return read_json(Path(given))


def _language_tower(source: Source) -> tuple[Source, tuple[str, ...]]:
    """Of a model that also sees or hears, and that is no family of its own, what reads text; with a note."""
    said, text = source.config.get("model_type"), source.config.get("text_config")
    if not isinstance(text, Mapping) or any(family.goes_by(said) for family in families().values()):
        return source, ()
    defaults = next((f.defaults for f in families().values() if f.goes_by(text.get("model_type"))), {})
    return Tower(source, {**defaults, **text}), ("the language tower only",)


def _strangeness(source: Source, family: Family) -> tuple[str, ...]:
    """A note where the config states a model type that the family does not go by."""
    said = source.config.get("model_type")
    if said is None or family.goes_by(said):
        return ()
    known = any(other.goes_by(said) for other in families().values())
    why = "does not fit its tensors" if known else "is not known"
    return (
        f"model type {_quoted(said)} {why}: read by its tensor names as {family.name}, "
        "whose scale and norms may not be its own",
    )


def _family_by_type(source: Source) -> Family | None:
    said = source.config.get("model_type")
    fitting = (family for family in families().values() if family.goes_by(said))
    return next((family for family in fitting if places(family, source.shapes, source.config)), None)


def _family_of(source: Source) -> Family:
    said = source.config.get("model_type")
    if (family := _family_by_type(source)) is not None:
        return family
    if isinstance(said, str) and said.startswith("gguf-"):
        read_ones = ", ".join(name.removeprefix("gguf-") for name in families()["gguf"].model_types)
        raise ValueError(
            f"{source.label} is a GGUF file of architecture {_quoted(said.removeprefix('gguf-'))}, which is not read; "
            f"those that are: {read_ones}"
        )
    recognised = recognise(source.shapes)
    if recognised is None:
        kind = f"the model type {_quoted(said)}" if said else "this layout"
        if isinstance(source, Live):
            raise ValueError(
                f"{source.label} has no attention that is known: it holds {_shown(source)}; where there is some, "
                "kq.read and kq.look can be told by query=, key= and heads="
            )
        if all(name.startswith("network.") for name in source.shapes):
            kind += " (an estimator's? then load it, and look at that)"
        raise ValueError(
            f"{source.label}: {kind} is not known. It holds {_shown(source)}. Say where its weights are: "
            "--query PATTERN --key PATTERN --heads N, with {layer} in the patterns"
        )
    return recognised


def _shown(source: Source) -> str:
    """Some of the names of a source's tensors."""
    names = sorted(source.shapes)
    more = f", … ({len(names)} in all)" if len(names) > 6 else ""
    return (", ".join(printable(name, NAME) for name in names[:6]) or "no tensors") + more


def _quoted(said: Any) -> str:
    """What a config says, in a message."""
    return printable(repr(said), NAME)
