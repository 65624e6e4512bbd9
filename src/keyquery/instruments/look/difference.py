"""How two checkpoints of one shape differ: how far each head's M = QᵀK has moved, and in which part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Form
from keyquery.support.progress import Progress, silent

PIECE = 2**21  # entries of a factor processed at a time


def difference(before: Heads, after: Heads, progress: Progress | None = None) -> dict[str, Any]:
    """‖ΔM‖/‖M‖, ‖ΔS‖/‖M‖ and ‖ΔA‖/‖M‖ per head, with M of `before`; the squares of the parts add up.

    `rows` has one row per head: "change", "symmetric" and "skew" of the raw weights, "folded" with biases and norms
    folded in; None where ‖M‖ is 0. If shapes differ, `rows` is None and `why` gives the reason. `notes` list other
    differences between layers, such as their scale. ΔM = ΔQᵀK₂ + Q₁ᵀΔK, of rank 2r, is never formed.
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


def compared_tensors(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of the tensors of two checkpoints: same by digest, changed, missing or new."""
    both = [name for name in before if name in after]
    return {
        "same": [name for name in both if before[name] == after[name]],
        "changed": [name for name in both if before[name] != after[name]],
        "missing": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
    }


def _moved(before: Form, after: Form) -> dict[str, list[float | None]]:
    """The change of each form and of its parts, relative to the norm before."""
    if before.dim != after.dim:  # only one has biases
        wide = max(before.dim, after.dim)
        before, after = (form if form.dim == wide else form.with_bias(None, None) for form in (before, after))
    each = math.prod(before.batch[1:]) * 2 * before.rank * before.dim
    count = max(PIECE // each, 1)
    cells = [
        _energies(before[start : start + count], after[start : start + count]) for start in range(0, len(before), count)
    ]
    symmetric, skew, norm = torch.cat(cells, -1)
    shares = {"change": symmetric + skew, "symmetric": symmetric, "skew": skew}
    return {
        name: [math.sqrt(share / size) if size else None for share, size in zip(moved, norm.tolist(), strict=True)]
        for name, moved in ((name, energy.tolist()) for name, energy in shares.items())
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
