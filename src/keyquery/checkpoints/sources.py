"""Where tensors come from: files, folders and live modules behind one small interface.

A source knows the names and shapes of its tensors without reading them, and reads rows of one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from keyquery.checkpoints.configs.defaults import completed
from keyquery.checkpoints.formats.torch_files import load_pickled
from keyquery.reading import digest
from keyquery.support.bounded_json import parse_json
from keyquery.support.files import beside, read_text, regular

# Parts of the names of what is not the language tower.
OTHER_TOWERS = ("vision", "visual", "image", "audio", "multi_modal")


@runtime_checkable
class Source(Protocol):
    """Tensors by name; nothing is read before `rows` is called."""

    @property
    def label(self) -> str:
        """What to call it: a path, a hub name, a class."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What it says of itself: config.json."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start to stop of a tensor, and nothing else of it where the format allows that."""


class Safetensors:
    """One safetensors file, or the shards that an index names."""

    def __init__(self, files: Mapping[str, Path], label: str, config: Mapping[str, Any]) -> None:
        self.label, self.config = label, config
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in dict.fromkeys(files.values()):
            with _open(path) as file:
                for name in list(file.keys()):
                    self._files[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor. The file is closed at once: what is mapped for one layer is not kept for the next."""
        with _open(self._files[name]) as file:
            return file.get_slice(name)[start:stop] if self.shapes[name] else file.get_tensor(name)


class Loaded:
    """Tensors that are in memory, or mapped into it: a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor], label: str, config: Mapping[str, Any]) -> None:
        self.label, self.config = label, config
        named = (item for item in tensors.items() if isinstance(item[0], str) and isinstance(item[1], Tensor))
        self._tensors = dict(named)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, not copied, unless it is sharded over processes (FSDP2): then it is gathered."""
        tensor = self._tensors[name].detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return tensor[start:stop] if tensor.ndim else tensor


class Renamed:
    """Another source, with a `weight` and a `bias` where files call them `gamma` and `beta`, as BERT's norms are."""

    def __init__(self, source: Source) -> None:
        self.label, self.config, self._source = source.label, source.config, source
        self._stored = {re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name)): name for name in source.shapes}
        self.shapes = {name: source.shapes[stored] for name, stored in self._stored.items()}

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor."""
        return self._source.rows(self._stored[name], start, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def with_usual_names(source: Source) -> Source:
    """A source whose norms are named as those of newer files."""
    return Renamed(source) if any(name.endswith(".gamma") for name in source.shapes) else source


class Tower:
    """The language tower of a model of images or audio too: its own config, and no other tower's tensors."""

    def __init__(self, whole: Source, config: Mapping[str, Any]) -> None:
        self.label, self.config, self._whole = whole.label, config, whole
        self.shapes = {name: shape for name, shape in whole.shapes.items() if not any(t in name for t in OTHER_TOWERS)}

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, as the whole model's source reads them."""
        return self._whole.rows(name, start, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class Live(Loaded):
    """The parameters of a live module, but for those of the submodules that are left out."""

    def __init__(self, model: nn.Module, without: Iterable[str] = ()) -> None:
        config: Any = getattr(model, "config", None)
        stated = config.to_dict() if hasattr(config, "to_dict") else _plain(config)
        facts = completed(stated or _of_torch(model))  # as a file's: its models may not look at all of it
        tensors, out = model.state_dict(keep_vars=True), tuple(f"{name}." if name else "" for name in without)
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(out)}
        super().__init__(kept, type(model).__name__, facts)
        self.model = model
        meta = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if meta:
            raise ValueError(f"{self.label} has no weights: {meta[0]} is on the meta device")

    def heads(self, module: str) -> int | None:
        """The number of heads that a module of the model says it has."""
        return getattr(self.model.get_submodule(module), "num_heads", None)


def _plain(config: Any) -> dict[str, Any]:
    """A config that is a dataclass, as nanoGPT's is, or a mapping; nothing of any other."""
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in fields(config)}
    return dict(config) if isinstance(config, Mapping) else {}


def _of_torch(model: nn.Module) -> dict[str, Any]:
    """What torch's own layers say of their norms, if all of them say the same."""
    layers = [m for m in model.modules() if isinstance(m, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))]
    facts = {(layer.norm_first, layer.norm1.eps) for layer in layers}
    if len(facts) != 1:
        return {}
    first, eps = facts.pop()
    return {"norm_first" if first else "norm_last": True, "layer_norm_eps": eps}


class Recorded:
    """Another source, and of what was read of it the digests: by name, and by rows where those were not all."""

    def __init__(self, source: Source, digests: dict[str, str]) -> None:
        self._source, self.digests = source, digests
        self.label, self.config, self.shapes = source.label, source.config, source.shapes

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, as the source reads them."""
        tensor = self._source.rows(name, start, stop)
        said = name if start == 0 and stop is None else f"{name}[{start}:{'' if stop is None else stop}]"
        if said not in self.digests:
            self.digests[said] = digest(tensor)
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}


def load_torch(paths: Iterable[Path], label: str, config: Mapping[str, Any]) -> Loaded:
    """The .bin, .pt or .pth files of a model: tensors in plain containers; a pickle of anything else is refused.

    Where there is no config, what a file says of itself beside its tensors stands in, as OpenAI's Whisper files do.
    """
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {}
    for path in paths:
        named, dims = _torch_file(path)
        tensors |= named
        said |= dims
    return Loaded(tensors, label, config or said)


def _torch_file(path: Path) -> tuple[Mapping[str, Tensor], dict[str, int]]:
    """Tensors by name, and the sizes that the file states under `dims` (Whisper) or `model_args` (nanoGPT)."""
    data = load_pickled(path, mapped=True)
    stated = (data.get(key) for key in ("dims", "model_args")) if isinstance(data, Mapping) else ()
    dims = next((sizes_of for sizes_of in stated if isinstance(sizes_of, Mapping)), {})
    sizes = {name: size for name, size in dims.items() if isinstance(name, str) and type(size) is int}
    for key in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping) or not any(isinstance(tensor, Tensor) for tensor in data.values()):
        raise ValueError(f"{path} holds no named tensors")
    return data, sizes


def read_index(path: Path) -> dict[str, Path]:
    """Which shard holds which tensor; shards must be files beside the index."""
    index = read_json(path)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{path} has no weight_map of file names")
    for name in set(shards.values()):
        if not beside(path.parent, name).is_file():
            raise FileNotFoundError(f"{path.parent} lacks the shard {name}")
    return {tensor: path.parent / name for tensor, name in shards.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; expected a JSON object")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def bare(model: nn.Module) -> nn.Module:
    """The model itself, without what torch.compile or data parallelism wraps around it; both share its weights."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a live torch.nn.Module, got {type(model).__name__}")
    while isinstance(inner := _wrapped(model), nn.Module):
        model = inner
    return model


def _wrapped(model: nn.Module) -> Any:
    parallel = isinstance(model, (nn.DataParallel, DistributedDataParallel))
    return model.module if parallel else getattr(model, "_orig_mod", None)


def _open(path: Path) -> Any:
    try:
        return safe_open(regular(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
