"""Layers that provide their own QK form, by the HasForm protocol, whatever their kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from keyquery.checkpoints.family import Family
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.layer import Layer, Norm, Projections
from keyquery.checkpoints.layouts import Values
from keyquery.checkpoints.locations import natural
from keyquery.checkpoints.sources import Source
from keyquery.forms import Form, Rope
from keyquery.reading import digests

FAMILY = Family("keyquery", [], [])


@runtime_checkable
class HasForm(Protocol):
    """An attention layer that provides its QK form, such as `kq.Attention`."""

    scale: float
    rope: Rope | None

    def form(self) -> Form:
        """QK forms: batch (heads,), or (kv heads, queries per kv head) under GQA."""
        ...

    def output_form(self) -> Form:
        """OV circuits, likewise."""
        ...

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of queries and keys."""
        ...


class FormedHeads(Heads):
    """The attention layers of a live model that provide their forms."""

    def __init__(self, source: Source, model: nn.Module) -> None:
        self.source = source
        self.family = FAMILY
        self._model = model
        self._layers = formed(model)
        self._digests: dict[str, str] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def depth(self) -> int:
        """Number of layers that provide their forms."""
        return len(self)

    def recorded(self, into: dict[str, str] | None = None) -> dict[str, str]:
        """Digests of the factors, by layer and role; filled as layers are read."""
        self._digests = {} if into is None else into
        return self._digests

    def _named(self) -> list[tuple[str, str]]:
        kinds = (getattr(self._model.get_submodule(name), "kind", "self") for name in self._layers)
        return list(zip(self._layers, kinds, strict=True))

    def _read(self, index: int) -> Layer:
        name = self._layers[index]
        module: Any = self._model.get_submodule(name)
        notes = getattr(module, "notes", ())
        weights = _projections(module)
        if self._digests is not None:
            said = {f"{name or 'attention'}.{role}": tensor for role, tensor in vars(weights).items()}
            self._digests |= digests({key: value for key, value in said.items() if value is not None})
        return Layer(
            index=index,
            label=self.labels()[index],
            name=name or "attention",
            kind=getattr(module, "kind", "self"),
            causal=self._causal(name),
            weights=weights,
            scale=module.scale,
            rope=module.rope,
            norm=self._norm(name),
            query_norm=_head_norm(module, "query_norm"),
            key_norm=_head_norm(module, "key_norm"),
            modules={"module": name},
            notes=tuple(notes),
        )

    def values(self, index: int) -> Values:
        """Not available: a layer that provides its form provides its OV circuit."""
        raise ValueError(f"{self._layers[index]}: its values are read as its output map alone")

    def _read_output(self, index: int) -> Form:
        module: Any = self._model.get_submodule(self._layers[index])
        return module.output_form()

    def _causal(self, name: str) -> bool:
        """As declared by the nearest enclosing module."""
        parts = name.split(".")
        around: Iterator[Any] = (self._model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1))
        return next(
            (module.is_causal for module in around if isinstance(getattr(module, "is_causal", None), bool)), False
        )

    def _norm(self, name: str) -> Norm | None:
        """The norm before a layer: its sibling named <layer>_norm, or as declared by its parent."""
        modules: dict[str, Any] = dict(self._model.named_modules())
        beside = modules.get(f"{name}_norm")
        fed_by, kind, eps = getattr(modules.get(name.rpartition(".")[0]), "fed_by", None) or (None, "layer", None)
        norm = modules.get(fed_by) if fed_by else beside if isinstance(beside, nn.LayerNorm) else None
        if norm is None or norm.weight is None:
            return None
        shift = getattr(norm, "bias", None)
        return Norm(kind, norm.weight.detach(), None if shift is None else shift.detach(), eps or norm.eps)


class MixedHeads(Heads):
    """Layers that provide their forms among layers read by their tensors, in the order of their names."""

    def __init__(self, said: FormedHeads, others: Heads) -> None:
        self.source, self.family = others.source, others.family
        layers = [(layer.name, heads, layer.index) for heads in (said, others) for layer in heads]
        self._order = [(heads, index) for _, heads, index in sorted(layers, key=lambda row: natural(row[0]))]
        self._both = (said, others)

    def recorded(self, into: dict[str, str] | None = None) -> dict[str, str]:
        """Digests of both."""
        digests = {} if into is None else into
        for heads in self._both:
            heads.recorded(digests)
        return digests

    def __len__(self) -> int:
        return len(self._order)

    def depth(self) -> int:
        """Number of layers of both."""
        return len(self)

    def _read(self, index: int) -> Layer:
        heads, there = self._order[index]
        return replace(heads[there], index=index, label=self.labels()[index])

    def _named(self) -> list[tuple[str, str]]:
        known = {id(heads): heads._named() for heads in self._both}
        return [known[id(heads)][index] for heads, index in self._order]

    def values(self, index: int) -> Values:
        """Delegates to the part that the layer belongs to."""
        heads, there = self._order[index]
        return heads.values(there)

    def _read_output(self, index: int) -> Form:
        heads, there = self._order[index]
        return heads._read_output(there)


def formed(model: nn.Module) -> list[str]:
    """Names of the layers of a model that provide their forms."""
    return [name for name, module in model.named_modules() if isinstance(module, HasForm)]


def _head_norm(module: Any, role: str) -> Norm | None:
    """The RMS norm of each head's queries or keys, if the layer has a module of this name."""
    norm = getattr(module, role, None)
    if not isinstance(norm, nn.RMSNorm) or norm.weight is None:
        return None
    return Norm("rms", norm.weight.detach().reshape(1, 1, -1), eps=norm.eps or 1e-6)


def _projections(module: HasForm) -> Projections:
    form = module.form()
    grouped = len(form.batch) == 2
    query, key = (t.detach() if grouped else t.detach().unsqueeze(1) for t in (form.query, form.key))
    groups, _, rank = query.shape[:3]
    biases = (None if bias is None else bias.detach().reshape(groups, -1, rank) for bias in module.biases())
    return Projections(query, key, *biases)
