"""`look`: the geometry of every head, its symmetric and skew part, from the weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from keyquery.checkpoints import Layer, read
from keyquery.forms import Form
from keyquery.reading import Reading, provenance


@dataclass(frozen=True, kw_only=True)
class Look(Reading, kind="look"):
    """The geometry of every head and layer of a model, view "raw": the weights alone, nothing folded in."""

    units: ClassVar[Mapping[str, str]] = {
        "symmetry": "tr(M²)/‖M‖², −1 skew to 1 symmetric",
        "directionality": "−1 columns to 1 rows stand out",
        "symmetric_energy": "‖S‖²",
        "skew_energy": "‖A‖²",
        "positive_share": "of ‖S‖²",
        "effective_rank": "exp of the entropy of σ(M)",
        "stable_rank": "‖M‖²/σ₁²",
        "eigenvalues": "of S, descending",
        "skew_values": "singular values of A, descending",
        "singular_values": "of M, descending",
        "scale": "by which the model multiplies the score",
    }

    model: Mapping[str, Any]
    layers: list[dict[str, Any]]
    heads: list[dict[str, Any]]

    def records(self) -> list[dict[str, Any]]:
        """One row a head: its place and every figure of it that is one number."""
        place = ("layer", "head", "name")
        return [{**{k: head[k] for k in place}, **_scalars(head["raw"])} for head in self.heads]


def look(model: nn.Module, name: str | None = None) -> Look:
    """Every head's geometry as a Reading; `name` is what to call the model (its class by default).

    >>> reading = kq.look(torch.nn.TransformerEncoderLayer(d_model=8, nhead=2))
    >>> [(head["layer"], head["head"]) for head in reading.heads]
    [(0, 0), (0, 1)]
    """
    layers, heads = [], []
    width = 0
    for layer in read(model):
        width = layer.form.dim
        layers.append({"layer": layer.index, "name": layer.name, "raw": _together(layer.form)})
        heads += _apart(layer)
    facts = {"name": name or type(model).__name__, "width": width, "layers": len(layers), "heads": len(heads)}
    return Look(model=facts, layers=layers, heads=heads, provenance=provenance(view="raw"))


def _apart(layer: Layer) -> list[dict[str, Any]]:
    """Every head's own figures."""
    form = layer.form
    symmetric, skew = form.core().energies
    figures = {
        "symmetry": form.symmetry,
        "directionality": form.directionality(),
        "symmetric_energy": symmetric,
        "skew_energy": skew,
        "positive_share": form.positive_share,
        "effective_rank": form.effective_rank(),
        "stable_rank": form.stable_rank(),
        "eigenvalues": form.eigenvalues(),
        "skew_values": form.skew_values(),
        "singular_values": form.singular_values(),
    }
    numbers = {name: figure.tolist() for name, figure in figures.items()}
    return [
        {
            "layer": layer.index,
            "head": head,
            "name": f"{layer.name}.{head}",
            "scale": layer.scale,
            "raw": {name: figure[head] for name, figure in numbers.items()},
        }
        for head in range(len(form))
    ]


def _together(form: Form) -> dict[str, float]:
    """The one M of all heads of a layer, M = Σ_h M_h: the score that is published for whole layers."""
    whole = form.sum()
    return {"symmetry": whole.symmetry.item(), "directionality": whole.directionality().item()}


def _scalars(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figure for name, figure in figures.items() if not isinstance(figure, list)}
