"""`compare`: two or more models, or checkpoints of one run, side by side, and how far each head differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from keyquery.checkpoints import Heads, Layer, read
from keyquery.forms import Form
from keyquery.forms.core import inner
from keyquery.instruments.look.look import look, opened
from keyquery.instruments.look.reading import FORMER, Look, check_fields
from keyquery.instruments.roles.naming import require
from keyquery.reading import Reading, provenance
from keyquery.support.progress import Progress, silent

PIECE = 2**21  # entries of a factor processed at a time
TENSORS = ("same", "changed", "missing", "new")
CHANGE = {"of": str, "from": str, "notes": list, **{f"tensors.{kind}": list for kind in TENSORS}}


@dataclass(frozen=True, kw_only=True)
class Comparison(Reading, kind="comparison"):
    """Several looks in the order given, each as the JSON of a Look.

    `changes` has an entry for each look after the first: how far each head has moved from the first (`rows`, or the
    reason `why` there are none), and which `tensors` are the same by digest, changed, missing or new.
    """

    units: ClassVar[Mapping[str, str]] = {
        "change": "‖ΔM‖/‖M‖ of the weights, M that of the first; so are symmetric, ‖ΔS‖/‖M‖, and skew, ‖ΔA‖/‖M‖",
        "folded": "the same of M with biases and norms in it",
    }

    former = FORMER
    readings: Sequence[Mapping[str, Any]]  # each as the JSON of a Look
    changes: Sequence[Mapping[str, Any]] = field(default_factory=list)  # per later look

    def __post_init__(self) -> None:
        super().__post_init__()
        check_changes(self.changes, len(self.readings))

    @property
    def looks(self) -> list[Look]:
        """The readings as Looks."""
        skipped = ("schema", "kind", "units")
        return [Look(**{k: v for k, v in reading.items() if k not in skipped}) for reading in self.readings]

    def ranking(self, number: int = 1) -> list[dict[str, Any]]:
        """Heads of a later look by falling change from the first; empty where the change is unknown."""
        rows = self.changes[number - 1]["rows"] if number <= len(self.changes) else None
        return sorted(rows or [], key=lambda row: (-(row["change"] or 0.0), -(row["folded"] or 0.0)))

    def records(self) -> list[dict[str, Any]]:
        """One row per head of each model, with its change where that is known."""
        rows, known = [], any(change["rows"] for change in self.changes)
        names = {"change": "change", **{f"change_{name}": name for name in ("symmetric", "skew", "folded")}}
        for number, reading in enumerate(self.looks):
            changed = {(row["layer"], row["head"]): row for row in self.ranking(number)} if number else {}
            for row in reading.records():
                change = changed.get((row["layer"], row["head"]), {})
                changes = {key: change.get(name) for key, name in names.items()} if known else {}
                rows.append({"model": reading.model["name"], **row, **changes})
        return rows


def check_changes(changes: Any, looks: int) -> None:
    """Validate the changes of a comparison, if it has any."""
    right = isinstance(changes, list) and len(changes) in (0, looks - 1)
    require(right, "comparison: changes", f"a list of {looks - 1}", changes)
    for number, change in enumerate(changes):
        where, rows = f"comparison: changes[{number}]", isinstance(change, Mapping) and change.get("rows")
        check_fields(where, change, CHANGE)
        require(rows is None or isinstance(rows, list), f"{where}.rows", "a list", rows)
        for names in change["tensors"].values():
            require(all(isinstance(name, str) for name in names), f"{where}.tensors", "lists of strings", names)
        for index, row in enumerate(rows or ()):
            check_fields(f"{where}.rows[{index}]", row, {"layer": int, "head": int})
            for name in ("change", "symmetric", "skew", "folded"):
                value = row.get(name, "nothing")
                right = value is None or (isinstance(value, (int, float)) and value >= 0)
                require(right, f"{where}.rows[{index}].{name}", "0 or more", value)


def compare(*looks: Any, weights: Sequence[Heads] | None = None, progress: Progress | None = None) -> Comparison:
    """Compare models, or checkpoints of one run, head by head.

    The change of a head is ‖ΔM‖/‖M‖, with ‖ΔS‖/‖M‖ and ‖ΔA‖/‖M‖ for its symmetric and skew parts; M is that of the
    first model.

    Parameters
    ----------
    *looks
        Two or more Looks, or anything that `kq.look` takes, such as a path or a live model.
    weights
        One `Heads` (from `kq.read`) per look, from which the change is computed. Default: read from `looks` if none of
        them is a Look; otherwise unknown, and only tensor digests are compared.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Comparison
        The looks and, for each after the first, its changes. Models of different shapes have no changes per head.

    Examples
    --------
    >>> reading = kq.look(torch.nn.MultiheadAttention(8, 2), name="small")
    >>> [row["model"]["name"] for row in compare(reading, reading).readings]
    ['small', 'small']
    """
    if len(looks) < 2:
        raise ValueError(f"compare needs at least two models, got {len(looks)}")
    if weights is not None and len(weights) != len(looks):
        raise ValueError(f"weights must have one entry per look, {len(looks)}, got {len(weights)}")
    readings = [source if isinstance(source, Look) else look(source, progress=progress) for source in looks]
    if weights is None and not any(isinstance(source, Look) for source in looks):
        weights = [read(opened(source)) for source in looks]
    changes = [_change(readings, weights, number, progress) for number in range(1, len(readings))]
    return Comparison(readings=[reading.to_dict() for reading in readings], changes=changes, provenance=provenance())


def _change(looks: list[Look], weights: Sequence[Heads] | None, number: int, progress: Progress | None) -> Any:
    first, other = looks[0], looks[number]
    unknown: dict[str, Any] = {"rows": None, "why": "the weights are not available", "notes": []}
    moved = unknown if weights is None else difference(weights[0], weights[number], progress)
    before, after = (look.provenance.get("tensors") or {} for look in (first, other))
    tensors = {
        "same": [name for name in before if after.get(name) == before[name]],
        "changed": [name for name in before if after.get(name, before[name]) != before[name]],
        "missing": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
    }
    return {"of": other.model["name"], "from": first.model["name"], **moved, "tensors": tensors}


def difference(before: Heads, after: Heads, progress: Progress | None = None) -> dict[str, Any]:
    """‖ΔM‖/‖M‖, ‖ΔS‖/‖M‖ and ‖ΔA‖/‖M‖ per head, None where ‖M‖ is 0, or why there are none; and other differences."""
    if len(before) != len(after):
        return {"rows": None, "why": f"{len(before)} attention layers and {len(after)}", "notes": []}
    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    pairs = zip(before, after, strict=True)
    for old, new in (progress or silent)(pairs, "comparing layers", len(before)):
        if shape_of(old) != shape_of(new):
            why = f"layer {old.label} has {_described(old)}, and {_described(new)}"
            return {"rows": None, "why": why, "notes": []}
        notes |= dict.fromkeys(_notes(old, new))
        raw, folded = changes_of(old.form, new.form), changes_of(old.folded, new.folded)
        for head in range(old.heads):
            parts = {name: raw[name][head] for name in ("change", "symmetric", "skew")}
            rows.append({"layer": old.index, "head": head, **parts, "folded": folded["change"][head]})
    return {"rows": rows, "why": None, "notes": list(notes)}


def changes_of(before: Form, after: Form) -> dict[str, list[float | None]]:
    """The change of each form and of its parts, relative to the norm before; some heads at a time, to bound memory."""
    if before.dim != after.dim:  # only one has biases
        wide = max(before.dim, after.dim)
        before, after = (form if form.dim == wide else form.with_bias(None, None) for form in (before, after))
    count = max(PIECE // (math.prod(before.batch[1:]) * 2 * before.rank * before.dim), 1)
    pieces = (slice(start, start + count) for start in range(0, len(before), count))
    changes = [relative_changes(*before[piece].wide(), *after[piece].wide()) for piece in pieces]
    return {name: [size for change in changes for size in change[name]] for name in changes[0]}


def relative_changes(
    q1: Float[Tensor, "*heads r d"],
    k1: Float[Tensor, "*#heads r d"],
    q2: Float[Tensor, "*heads r d"],
    k2: Float[Tensor, "*#heads r d"],
) -> dict[str, list[float | None]]:
    """‖ΔM‖, ‖ΔS‖ and ‖ΔA‖ over ‖M‖ of each head: ΔM = ΔQᵀK₂ + Q₁ᵀΔK = LᵀR, which is never formed.

    ‖LᵀR‖² = Σ (LLᵀ)∘(RRᵀ) and ⟨LᵀR, RᵀL⟩ = Σ (LRᵀ)∘(RLᵀ), with L = [ΔQ; Q₁] and R = [K₂; ΔK] in blocks: differences
    first, so that small changes keep their digits.
    """
    dq, dk = q2 - q1, k2 - k1
    gram = q1 @ q1.mT
    norm = _sum(gram, k1 @ k1.mT)
    total = _sum(dq @ dq.mT, k2 @ k2.mT) + _sum(gram, dk @ dk.mT) + 2 * _sum(dq @ q1.mT, k2 @ dk.mT)
    keys = torch.cat((k2, dk), -2)
    (dq_k2, dq_dk), (q1_k2, q1_dk) = (inner(query, keys).chunk(2, -1) for query in (dq, q1))
    exchanged = _sum(dq_k2, dq_k2.mT) + 2 * _sum(dq_dk, q1_k2.mT) + _sum(q1_dk, q1_dk.mT)
    parts = {"change": total, "symmetric": (total + exchanged) / 2, "skew": (total - exchanged) / 2}
    sizes = norm.flatten().tolist()

    def relative(energies: Tensor) -> list[float | None]:
        pairs = zip(energies.flatten().tolist(), sizes, strict=True)
        return [math.sqrt(max(energy, 0.0) / size) if size else None for energy, size in pairs]

    return {name: relative(energies) for name, energies in parts.items()}


def _sum(first: Tensor, second: Tensor) -> Float64[Tensor, "*heads"]:
    """⟨first, second⟩ of each head; float64, since terms of `exchanged` cancel."""
    return (first.double() * second).sum((-2, -1))


def shape_of(layer: Layer) -> tuple[Any, ...]:
    """What two layers must have in common, so that their heads can be compared."""
    return layer.kind, layer.weights.query.shape, layer.weights.key.shape


def _described(layer: Layer) -> str:
    groups, shared, rank, dim = layer.weights.query.shape
    keys = f" on {groups} keys" if shared > 1 else ""
    return f"{layer.heads} heads{keys} of width {rank} in {dim}"


def _notes(before: Layer, after: Layer) -> list[str]:
    """Differences other than the weights."""
    equal = {
        "the scale of the scores": math.isclose(before.scale, after.scale),
        "the rotation of queries and keys": _rotation(before) == _rotation(after),
        "the window": before.window == after.window,
        "the causal mask": before.causal == after.causal,
    }
    return [f"{name} differs in some layers" for name, same in equal.items() if not same]


def _rotation(layer: Layer) -> Any:
    if (rope := layer.rope) is None:
        return None
    turns = rope.base if rope.frequencies is None else rope.frequencies.tolist()
    return rope.dims, rope.interleaved, rope.factor, turns
