"""LoRA adapters in PEFT's files, added to the weights of a base model as they are read: W + (α/r)·B·A."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints.formats.torch_files import load_pickled
from keyquery.checkpoints.hub import located
from keyquery.checkpoints.sources import Live, Source, read_json, read_tensors
from keyquery.support.files import beside
from keyquery.support.printable import NAME, printable

PREFIX = "base_model.model."
PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$)[^.]+)?(?:\.weight)?"  # older files name the adapter, such as "default"
)
SAVED = re.compile(r"(?:\.base_layer|\.modules_to_save(?:\.(?!weight$|bias$)[^.]+)?)(?=\.[^.]+$)")
# Options that change what the tensors mean, and their values that do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}
MAX_ALPHA = 1e9
# Initialisations that replace the base weights by what the adapter leaves over.
REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, eq=False)
class Change:
    """What an adapter adds to one weight."""

    down: Tensor  # A, (r, in)
    up: Tensor  # B, (out, r)
    scale: float
    magnitude: Tensor | None = None  # DoRA: the norm of each output's weights
    transposed: bool = False  # the weight is stored (in, out), as GPT-2's and embeddings are

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        shape = len(self.up), self.down.shape[1]
        return shape[::-1] if self.transposed else shape

    def added_to(self, weight: Tensor) -> Tensor:
        """The weight with the change, in float32 at least."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = self.scale * (self.up.to(wide) @ self.down.to(wide))
        weight = weight.to(wide) + (change.mT if self.transposed else change)
        if self.magnitude is None:
            return weight
        outputs = 1 if self.transposed else 0
        norm = torch.linalg.vector_norm(weight, dim=1 - outputs, keepdim=True)
        return weight * self.magnitude.to(wide).reshape(norm.shape) / norm


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of an adapter by module, and the tensors that it replaces."""

    name: str
    base: str  # what the adapter's config names as its base
    changes: Mapping[str, Change]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)


def load_adapter(path: str | Path) -> Adapter:
    """Read a folder of PEFT: adapter_config.json, and adapter_model.safetensors or .bin."""
    folder = located(path)
    if not folder.is_dir() or not (file := beside(folder, "adapter_config.json")).is_file():
        raise FileNotFoundError(f"adapter must be a folder with adapter_config.json, and {path} is none")
    facts = read_json(file)
    _require_plain(folder, facts)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in _tensors(folder).items()}
    parts: dict[str, dict[str, Tensor]] = {}
    replaced = {}
    for name, tensor in tensors.items():
        if match := PARTS.fullmatch(name):
            parts.setdefault(match["module"], {})[match["part"]] = tensor
        elif "lora_" in name.rpartition(".")[0]:
            raise ValueError(f"{folder}: {printable(name, NAME)} is no tensor of a plain LoRA")
        else:
            replaced[SAVED.sub("", name)] = tensor
    changes = {module: _change(folder, module, part, facts) for module, part in parts.items()}
    if not changes and not replaced:
        raise ValueError(f"{folder} is an adapter without tensors")
    return Adapter(folder.name, str(facts.get("base_model_name_or_path") or "none"), changes, replaced)


def adapted_name(source: Any, adapter: str | Path | None) -> str | None:
    """The name of a model with an adapter, "base + adapter"; None if there is no adapter."""
    if adapter is None:
        return None
    if isinstance(source, nn.Module):
        raise ValueError("adapter needs a checkpoint on disk: merge it into the live model instead")
    return f"{Path(str(source)).name} + {Path(adapter).name}"


def merge_into(model: nn.Module, adapter: Adapter) -> None:
    """Add an adapter to a live model, in place."""
    adapted = Adapted(Live(model), adapter)
    with torch.no_grad():
        for name in adapted.changed:
            model.get_parameter(name).copy_(adapted.rows(name))


class Adapted:
    """Another source with an adapter: its changed weights are computed when they are read."""

    def __init__(self, source: Source, adapter: Adapter) -> None:
        self._source, self.adapter = source, adapter
        self.label, self.config, self.shapes = f"{source.label} + {adapter.name}", source.config, source.shapes
        names: dict[str, list[str]] = {}
        for name in source.shapes:
            names.setdefault(_ending(name), []).append(name)
        weights = {f"{module}.weight": change.shape for module, change in adapter.changes.items()}
        tensors = {name: tuple(tensor.shape) for name, tensor in adapter.replaced.items()}
        self.changed = {
            base: name
            for name, shape in {**tensors, **weights}.items()
            if (base := self._base_name(name, shape, names, name in weights)) is not None
        }
        for name, tensor in adapter.replaced.items():  # biases of weights that have none in the base
            weight = _same(
                f"{name.removesuffix('.bias')}.weight", names.get(_ending(name).replace(".bias", ".weight"), [])
            )
            if name.endswith(".bias") and name not in self.changed.values() and weight is not None:
                added = f"{weight.removesuffix('.weight')}.bias"
                self.changed[added], self.shapes = name, {**self.shapes, added: tuple(tensor.shape)}

    def _base_name(self, name: str, shape: tuple[int, ...], names: Mapping[str, list[str]], needed: bool) -> str | None:
        """The base's name of a tensor: the same, but for what stands before the layers."""
        matching = _same(name, names.get(_ending(name), []))
        if matching is None:
            if not needed:  # such as a new head, or a bias that is not stored where it is 0
                return None
            raise ValueError(
                f"the adapter {self.adapter.name} changes {printable(name, NAME)}, which {self._source.label} does not "
                f"have: it is for another base, {printable(self.adapter.base, NAME)}"
            )
        if tuple(self.shapes[matching]) != shape:
            raise ValueError(
                f"the adapter {self.adapter.name} is for {printable(name, NAME)} of shape {shape}, and {matching} of "
                f"{self._source.label} has the shape {tuple(self.shapes[matching])}: it is for another base, "
                f"{printable(self.adapter.base, NAME)}"
            )
        return matching

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, with the adapter."""
        if name not in self.changed:
            return self._source.rows(name, start, stop)
        entry = self.changed[name]
        tensor = self.adapter.replaced.get(entry)
        tensor = self._source.rows(name) if tensor is None else tensor
        change = self.adapter.changes.get(entry.removesuffix(".weight"))
        return (tensor if change is None else change.added_to(tensor))[start:stop]

    def adapted(self, name: str) -> str | None:
        """What the adapter does to a tensor, in words."""
        entry = self.changed.get(name)
        if entry is None:
            return None
        change = self.adapter.changes.get(entry.removesuffix(".weight"))
        if change is None:
            return "replaced"
        return f"{'LoRA' if change.magnitude is None else 'DoRA'} of rank {len(change.down)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _same(name: str, candidates: list[str]) -> str | None:
    """Of names with the same ending, the one that differs at most in what stands before the layers."""
    if name in candidates:
        return name
    fitting = []
    for candidate in candidates:
        path, other = name.split("."), candidate.split(".")
        while path and other and path[-1] == other[-1]:
            path.pop(), other.pop()
        if not any(part.isdecimal() for part in (*path, *other)):
            fitting.append((len(path) + len(other), candidate))
    fitting.sort()
    unique = len(fitting) == 1 or (len(fitting) > 1 and fitting[0][0] < fitting[1][0])
    return fitting[0][1] if unique else None


def _require_plain(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raise for what is not LoRA or DoRA, by name."""
    kind = facts.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder} is an adapter of type {printable(repr(kind), NAME)}; LORA is supported")
    for option, plain in PLAIN.items():
        if facts.get(option) not in plain:
            raise ValueError(f"{folder} is a LoRA with {option}, which is not supported")
    start = facts.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(REPLACING):
        raise ValueError(
            f"{folder} is a LoRA with init_lora_weights {start!r:.30}, which changes the base too: convert it to a "
            "plain LoRA (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )


def _tensors(folder: Path) -> Mapping[str, Tensor]:
    if (file := beside(folder, "adapter_model.safetensors")).is_file():
        return read_tensors(file)
    if not (file := beside(folder, "adapter_model.bin")).is_file():
        raise FileNotFoundError(f"{folder} has neither adapter_model.safetensors nor adapter_model.bin")
    tensors = load_pickled(file, mapped=True)
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{file} holds no named tensors")
    return {name: value for name, value in tensors.items() if isinstance(name, str) and isinstance(value, Tensor)}


def _change(folder: Path, module: str, parts: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Change:
    """A module's change; raises if A or B is missing, or if they do not fit each other."""
    ends = ("lora_embedding_A", "lora_embedding_B") if "lora_embedding_A" in parts else ("lora_A", "lora_B")
    shown = printable(module, NAME)
    for end in ends:
        if end not in parts:
            raise ValueError(f"{folder} lacks {shown}.{end}")
    down, up = (parts[end] for end in ends)
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or 0 in down.shape:
        raise ValueError(
            f"{folder}: {shown} has {ends[0]} of shape {tuple(down.shape)} and {ends[1]} of shape {tuple(up.shape)}, "
            "expected (r, in) and (out, r)"
        )
    magnitude = parts.get("lora_magnitude_vector")
    if facts.get("use_dora") and magnitude is None:
        raise ValueError(f"{folder} lacks {shown}.lora_magnitude_vector, which DoRA needs")
    embedding = ends[0] != "lora_A"
    outputs = down.shape[1] if embedding else len(up)
    if magnitude is not None and (embedding or magnitude.numel() != outputs):
        raise ValueError(f"{folder}: {shown}.lora_magnitude_vector has {magnitude.numel()} values, expected {outputs}")
    transposed = embedding or bool(facts.get("fan_in_fan_out"))
    return Change(down, up, _scale(folder, module, len(down), facts), magnitude, transposed)


def _scale(folder: Path, module: str, rank: int, facts: Mapping[str, Any]) -> float:
    """α/r, or α/√r where the adapter is rank-stabilised; α may be the module's own."""
    patterns = facts.get("alpha_pattern")
    alpha = facts.get("lora_alpha", 8)
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if _matches(str(pattern), module):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) < MAX_ALPHA:
        raise ValueError(f"{folder}: lora_alpha must be a number, got {alpha!r:.30}")
    return float(alpha) / (math.sqrt(rank) if facts.get("use_rslora") else rank)


def _matches(pattern: str, module: str) -> bool:
    """Whether a module's name is, or ends in, that of a pattern; patterns that are not plain names are refused.

    PEFT takes them as regular expressions, which an untrusted file could make take forever.
    """
    plain = pattern.replace(r"\.", ".").removeprefix("^")
    if not re.fullmatch(r"[\w.]+", plain):
        raise ValueError(f"alpha_pattern holds {printable(repr(pattern), NAME)}; names of modules are supported")
    return module == plain if pattern.startswith("^") else module == plain or module.endswith(f".{plain}")
