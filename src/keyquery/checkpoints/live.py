"""Layers that know their own form: any module that keeps this Protocol is read as it stands, whatever its kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from keyquery.checkpoints.family import Family
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.layer import Layer, Norm, Projections
from keyquery.checkpoints.sources import Source
from keyquery.forms import Form, Rope

FAMILY = Family("keyquery", [], [])


@runtime_checkable
class HasForm(Protocol):
    """An attention layer that says its form; `kq.Attention` is one."""

    scale: float
    rope: Rope | None

    def form(self) -> Form:
        """The heads' kernels: batch (heads,), or (key heads, queries that share one)."""
        ...

    def output_form(self) -> Form:
        """The heads' output maps, likewise."""
        ...

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of queries and keys."""
        ...


class FormedHeads(Heads):
    """The attention layers of a live model whose layers say their forms."""

    def __init__(self, source: Source, model: nn.Module) -> None:
        self.source, self.family, self._model = source, FAMILY, model
        self._layers = formed(model)

    def __len__(self) -> int:
        return len(self._layers)

    def _read(self, index: int) -> Layer:
        name = self._layers[index]
        module: Any = self._model.get_submodule(name)
        notes = getattr(module, "notes", ())
        return Layer(
            index=index,
            name=name or "attention",
            kind="self",
            causal=self._causal(name),
            weights=_projections(module),
            scale=module.scale,
            rope=module.rope,
            norm=self._norm(name),
            modules={"module": name},
            notes=tuple(notes),
        )

    def _read_output(self, index: int) -> Form:
        module: Any = self._model.get_submodule(self._layers[index])
        return module.output_form()

    def _causal(self, name: str) -> bool:
        """As the nearest module around it says."""
        parts = name.split(".")
        around: Iterator[Any] = (self._model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1))
        return next(
            (module.is_causal for module in around if isinstance(getattr(module, "is_causal", None), bool)), False
        )

    def _norm(self, name: str) -> Norm | None:
        """The norm that feeds a layer stands beside it, under the layer's name and _norm."""
        beside = dict(self._model.named_modules()).get(f"{name}_norm")
        if not isinstance(beside, nn.LayerNorm) or beside.weight is None:
            return None
        shift = None if beside.bias is None else beside.bias.detach()
        return Norm("layer", beside.weight.detach(), shift, beside.eps)


def formed(model: nn.Module) -> list[str]:
    """Names of the layers of a model that say their forms."""
    return [name for name, module in model.named_modules() if isinstance(module, HasForm)]


def _projections(module: HasForm) -> Projections:
    form = module.form()
    grouped = len(form.batch) == 2
    query, key = (t.detach() if grouped else t.detach().unsqueeze(1) for t in (form.query, form.key))
    groups, _, rank = query.shape[:3]
    biases = (None if bias is None else bias.detach().reshape(groups, -1, rank) for bias in module.biases())
    return Projections(query, key, *biases)
