"""`lineage`: is one model made from another? Two tests on queries and keys, and a label with its evidence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from keyquery.checkpoints import Heads, read
from keyquery.instruments.lineage.evidence import Evidence, basis_free, p_text, shared_basis
from keyquery.instruments.lineage.fingerprint import PERMUTATIONS, Fingerprint, fingerprint
from keyquery.instruments.lineage.weight_change import WeightChange, weight_change
from keyquery.reading import Reading, provenance
from keyquery.support.progress import Progress

LEVEL = 1e-4  # p-values below it count as evidence
ROUNDING = 1e-5  # relative change of M that rounding in float32 explains
ROUNDED = 0.1  # of the inversions that a random change of equal size makes, below which a change is rounding
ROTATED = 5.0  # times the change of the forms, above which a change of the weights is one of basis
FAR = 0.7  # median change of M, from which what the models share may be no more than their initialisation
FEW = 12  # heads below which nothing found is not evidence that there is nothing


@dataclass(frozen=True, kw_only=True)
class Lineage(Reading, kind="lineage"):
    """Whether `theirs` shares weights with `ours`: a label, its reasons, both tests, and how far each head moved."""

    units: ClassVar[Mapping[str, str]] = {
        "statistic": "standard deviations of the null",
        "change": "‖ΔM‖/‖M‖ of the weights, M that of the first model; symmetric and skew likewise",
    }

    ours: str  # name of the first model
    theirs: str  # name of the second model
    label: str  # the relation, in words
    reasons: Sequence[str]  # sentences
    tests: Sequence[Mapping[str, Any]]  # per test: statistic, p-value, matched layers and heads
    layers: Mapping[str, Sequence[int]]  # "ours" and "theirs": which layers of each checkpoint the tests number from 0
    changes: Sequence[Mapping[str, Any]] = field(default_factory=list)  # per head, where layers correspond one to one
    merge: Sequence[Mapping[str, Any]] = field(default_factory=list)  # weight of each model in a merge, if asked for

    def records(self) -> list[dict[str, Any]]:
        """One row per head of the second model: its source, similarity, and change; layers as in the checkpoints."""
        ours, theirs = self.layers["ours"], self.layers["theirs"]
        moved = {(row["layer"], row["head"]): row for row in self.changes}
        rows = []
        for test in self.tests:
            columns = (theirs, test["path"], test["heads"], test["similarity"])
            for layer, source, heads, similarity in zip(*columns, strict=True):
                for head, (own, value) in enumerate(zip(heads, similarity, strict=True)):
                    place = {"test": test["test"], "layer": layer, "head": head}
                    change = moved.get((layer, head), {}).get("change")
                    rows.append(
                        {**place, "from_layer": ours[source], "from_head": own, "similarity": value, "change": change}
                    )
        return rows


def lineage(ours: Any, theirs: Any, others: Sequence[Any] = (), progress: Progress | None = None) -> Lineage:
    """Whether the second model shares weights with the first.

    A match is evidence of shared weights, not of who copied whom.

    Parameters
    ----------
    ours, theirs
        Whatever `kq.read` takes: a folder, a file (safetensors, GGUF, torch), a hub name, a live model.
    others
        Models of the same shape that a merge may also be made of; their weights in it are estimated.
    progress
        Progress display. Default: none.

    Returns
    -------
    Lineage
        With the label "identical", "requantised", "fine-tuned", "merged", "pruned or stacked", "disguised",
        "unrelated" or "cannot tell", and both tests.

    Examples
    --------
    >>> model = kq.Decoder(32, depth=4, heads=4)
    >>> kq.lineage(model, model).label
    'identical'
    """
    first, second, *rest = (model if isinstance(model, Heads) else read(model) for model in (ours, theirs, *others))
    merging = bool(rest)
    mine = fingerprint(first, progress=progress, linear=merging)
    other = fingerprint(second, PERMUTATIONS, progress, linear=merging)
    tests = [test for test in (basis_free(mine, other), shared_basis(mine, other)) if test is not None]
    in_order = _in_order(tests, mine, other)
    moved = weight_change(first, second, progress) if in_order else None
    merge = (
        _merge([mine, *(fingerprint(model, progress=progress, linear=True) for model in rest)], other) if rest else []
    )
    label, reasons = _label(mine, other, tests, merge, moved)
    return Lineage(
        ours=mine.name,
        theirs=other.name,
        label=label,
        reasons=reasons,
        tests=[vars(test) for test in tests],
        layers={"ours": [layer.index for layer in mine.layers], "theirs": [layer.index for layer in other.layers]},
        changes=moved.rows if moved else [],
        merge=merge,
        provenance=provenance(ours=dict(first.model), theirs=dict(second.model), level=LEVEL),
    )


def _in_order(tests: Sequence[Evidence], mine: Fingerprint, other: Fingerprint) -> bool:
    """Whether layers correspond one to one, in the same basis."""
    whole = list(range(len(mine.layers)))
    same = len(other.layers) == len(whole)
    return same and any(test.test == "shared basis" and test.p < LEVEL and test.path == whole for test in tests)


def _label(
    mine: Fingerprint,
    other: Fingerprint,
    tests: Sequence[Evidence],
    merge: Sequence[Mapping[str, Any]],
    moved: WeightChange | None,
) -> tuple[str, list[str]]:
    """The label, and the reasons for it in words."""
    if mine.digests and sorted(mine.digests.values()) == sorted(other.digests.values()):
        return "identical", ["all query and key tensors are equal, bit for bit"]
    by_test = {test.test: test for test in tests}
    related = {name for name, test in by_test.items() if test.p < LEVEL}
    reasons = [f"{name}: p = {p_text(test.p)}".replace("= <", "<") for name, test in by_test.items()]
    if not related:
        if not tests:
            return "cannot tell", ["heads and residual streams have different widths: neither test applies"]
        if min(mine.heads, other.heads) < FEW:
            return "cannot tell", [*reasons, f"too few heads: {min(mine.heads, other.heads)}"]
        return "unrelated", [*reasons, "no evidence of shared weights"]
    best = by_test["shared basis" if "shared basis" in related else "basis-free"]
    if best.path != list(range(len(mine.layers))):
        return "pruned or stacked", [*reasons, "layers come from " + ", ".join(map(str, best.path))]
    if "shared basis" not in related:
        return "disguised", [*reasons, "equal spectra in another basis: the residual stream was rotated or permuted"]
    if best.reordered:
        return "disguised", [*reasons, "heads stand in another order"]
    return _degree(merge, moved, reasons)


def _degree(
    merge: Sequence[Mapping[str, Any]],
    moved: WeightChange | None,
    reasons: list[str],
) -> tuple[str, list[str]]:
    """The label of models whose layers and heads correspond in one basis, by how they differ."""
    sizes = [] if moved is None else [row["change"] for row in moved.rows if row["change"] is not None]
    if not sizes or moved is None:
        return "fine-tuned", reasons
    changed = [size for size in sizes if size > ROUNDING]  # a fine-tune may freeze the others
    typical = statistics.median(changed) if changed else 0.0
    if len(changed) < len(sizes):
        reasons.append(f"{len(sizes) - len(changed)} of {len(sizes)} heads have the same QK form")
    which = "a head" if len(changed) == len(sizes) else "the other heads"
    reasons.append(f"median change of {which}: {typical:.2g} of ‖M‖, of Wq: {moved.size:.2g}")
    if not changed and moved.size <= ROUNDING:
        return "identical", [*reasons, "equal weights, stored otherwise"]
    if moved.size > ROTATED * max(typical, ROUNDING):
        return "disguised", [*reasons, "nearly the same forms of other weights: rotated or rescaled inside heads"]
    if sum(row["weight"] > 0.1 for row in merge) > 1:
        parts = ", ".join(f"{row['weight']:.2f} × {row['model']}" for row in merge)
        return "merged", [*reasons, parts]
    if moved.inversions < ROUNDED:
        return "requantised", [*reasons, "the change of the weights is rounding: it keeps their order"]
    reasons.append("the change of the weights is not rounding")
    if typical > FAR:
        reasons.append("so large a change also comes from training one initialisation twice, or from noise")
    return "fine-tuned", reasons


def _merge(models: Sequence[Fingerprint], target: Fingerprint) -> list[dict[str, Any]]:
    """Least-squares weights of models in a merge, from sketches that are linear in the weights."""
    shapes = {tuple(layer.weights.shape for layer in model.layers) for model in (*models, target)}  # type: ignore[union-attr]
    if len(shapes) > 1:
        return []
    columns, goal = (
        torch.stack([torch.cat([layer.weights for layer in model.layers]) for model in side], 1).double()  # type: ignore[misc]
        for side in (models, [target])
    )
    weights = torch.linalg.lstsq(columns, goal).solution[:, 0].tolist()
    return [{"model": model.name, "weight": weight} for model, weight in zip(models, weights, strict=True)]
