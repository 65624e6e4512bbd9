"""`compare`: two or more models, or checkpoints of one run, side by side, and how far each head differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads, Layer, read
from keyquery.forms import Form
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
        """Heads of a later look by falling change from the first; empty where the change is unknown.

        >>> before, after = torch.nn.MultiheadAttention(8, 2), torch.nn.MultiheadAttention(8, 2)
        >>> rows = compare(before, after).ranking()
        >>> rows[0]["change"] >= rows[1]["change"] > 0
        True
        """
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

    See Also
    --------
    look : The metrics of one model.
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
    """‖ΔM‖/‖M‖, ‖ΔS‖/‖M‖ and ‖ΔA‖/‖M‖ per head, None where ‖M‖ is 0, or why there are none; and other differences.

    ΔM = ΔQᵀK₂ + Q₁ᵀΔK, of rank 2r, is never formed.
    """
    if len(before) != len(after):
        return {"rows": None, "why": f"{len(before)} attention layers and {len(after)}", "notes": []}
    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    pairs = zip(before, after, strict=True)
    for old, new in (progress or silent)(pairs, "comparing layers", len(before)):
        if _shape(old) != _shape(new):
            why = f"layer {old.label} has {_described(old)}, and {_described(new)}"
            return {"rows": None, "why": why, "notes": []}
        notes |= dict.fromkeys(_notes(old, new))
        raw, folded = _moved(old.form, new.form), _moved(old.folded, new.folded)
        for head in range(old.heads):
            parts = {name: raw[name][head] for name in ("change", "symmetric", "skew")}
            rows.append({"layer": old.index, "head": head, **parts, "folded": folded["change"][head]})
    return {"rows": rows, "why": None, "notes": list(notes)}


def _moved(before: Form, after: Form) -> dict[str, list[float | None]]:
    """The change of each form and of its parts, relative to the norm before; some heads at a time, to bound memory."""
    if before.dim != after.dim:  # only one has biases
        wide = max(before.dim, after.dim)
        before, after = (form if form.dim == wide else form.with_bias(None, None) for form in (before, after))
    count = max(PIECE // (math.prod(before.batch[1:]) * 2 * before.rank * before.dim), 1)
    pieces = (slice(start, start + count) for start in range(0, len(before), count))
    symmetric, skew, norm = torch.cat([_energies(before[piece], after[piece]) for piece in pieces], -1)
    shares = {"change": symmetric + skew, "symmetric": symmetric, "skew": skew}
    return {
        name: [math.sqrt(part / size) if size else None for part, size in torch.stack((energy, norm), 1).tolist()]
        for name, energy in shares.items()
    }


def _energies(before: Form, after: Form) -> Float[Tensor, "3 heads"]:
    """‖ΔS‖², ‖ΔA‖² and ‖M‖² of every head."""
    norm = before.norm2
    (q1, k1), (q2, k2) = before.wide(), after.wide()
    if torch.equal(q1, q2) and torch.equal(k1, k2):
        energies = torch.zeros(2, *norm.shape, dtype=norm.dtype)
    else:  # differences of factors first, to keep precision for small changes
        moved = Form(torch.cat((q2 - q1, q1), -2), torch.cat((k2, k2 - k1), -2))
        energies = torch.stack(moved.core().energies)
    return torch.cat((energies, norm[None])).flatten(1).cpu()


def _shape(layer: Layer) -> tuple[Any, ...]:
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
