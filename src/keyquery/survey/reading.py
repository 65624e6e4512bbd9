"""The result of a survey: trends over training, model size and architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

import numpy as np

from keyquery.reading import Reading
from keyquery.support.statistics import spearman

FIGURES = ("symmetry", "symmetry_folded", "symmetry_together", "column_directionality", "rank_used")
NUMBERS = {  # numeric fields of each summary, except those that may be None
    "runs": ("steps", "first", "last", "start", "end", "change"),
    "sizes": ("models", "smallest", "largest", "slope"),
    "families": ("models", "heads", "symmetry", "lowest", "highest"),
}
SOME = 3  # minimum number of model sizes for a trend


@dataclass(frozen=True, kw_only=True)
class Survey(Reading, kind="survey"):
    """One row per model; summaries of training runs, sizes and architectures; and models that could not be read."""

    units: ClassVar[Mapping[str, str]] = {
        "symmetry": "tr(M²)/‖M‖² of the weights, −1 skew to 1 symmetric, mean over heads",
        "symmetry_folded": "the same with LayerNorm-folded weights and biases",
        "symmetry_low": "lower quartile over heads; symmetry_high: upper quartile",
        "symmetry_together": "symmetry of the summed M of all heads of a layer, median over layers",
        "column_directionality": "of the summed M of a layer, −1 column outliers to 1 row outliers, median over layers",
        "rank_used": "effective rank over head width, mean over heads",
        "parameters": "number of parameters in the checkpoint",
        "half": "first recorded step with at least half of the total change in symmetry",
        "rises": "Spearman rank correlation, −1 to 1, of symmetry with steps or with parameters",
        "slope": "change of symmetry per tenfold increase in parameters, least squares",
    }

    models: Sequence[Mapping[str, Any]]  # one row per model
    runs: Sequence[Mapping[str, Any]] = field(default_factory=list)  # one row per training run
    sizes: Sequence[Mapping[str, Any]] = field(default_factory=list)  # one row per set of model sizes
    families: Sequence[Mapping[str, Any]] = field(default_factory=list)  # one row per architecture
    broken: Sequence[Mapping[str, str]] = field(default_factory=list)  # models that could not be read, and why

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in NUMBERS.items():
            for row in getattr(self, name):
                if wrong := [key for key in needed if not isinstance(row.get(key), (int, float))]:
                    value = f"{row.get(wrong[0])!r:.60}"
                    raise TypeError(f"{wrong[0]} in {name} of a survey must be a number, got {value}")

    def records(self) -> list[dict[str, Any]]:
        """One row per model: its metadata and scalar metrics."""
        return [
            {name: value for name, value in row.items() if not isinstance(value, (list, dict))} for row in self.models
        ]


def answer(models: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Summaries over runs, sizes and architectures; for the latter two, a run counts once, by its last checkpoint."""
    last = final(models)
    return {"runs": _runs(models), "sizes": _sizes(last), "families": _families(last)}


def final(models: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Models that belong to no run, and the last checkpoint of every run."""
    last: dict[Any, Mapping[str, Any]] = {}
    for row in models:
        key = row["name"] if row["run"] is None else ("run", row["run"])
        if key not in last or (row["step"] or 0) > (last[key]["step"] or 0):
            last[key] = row
    return list(last.values())


def _runs(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for run, members in _grouped((row for row in models if row["run"] is not None), "run"):
        course = sorted(members, key=lambda row: row["step"])
        if len(course) < 2:
            continue
        values = [row["symmetry"] for row in course]
        change = values[-1] - values[0]
        half = next(
            row["step"]
            for row, value in zip(course, values, strict=True)
            if abs(value - values[0]) >= abs(change) / 2 and (value - values[0]) * change >= 0
        )
        steps = [row["step"] for row in course]
        summary = {"run": run, "family": course[-1]["family"], "steps": len(course), "first": steps[0]}
        summary |= {"last": steps[-1], "start": values[0], "end": values[-1], "change": change}
        rows.append({**summary, "half": half if change else None, "rises": spearman(steps, values)})
    return rows


def _sizes(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for family, members in [("all", list(models)), *_grouped(models, "family")]:
        sizes = [row["parameters"] for row in members]
        if len(set(sizes)) < SOME or (family != "all" and len(members) == len(models)):
            continue
        values = [row["symmetry"] for row in members]
        slope = float(np.polyfit(np.log10(sizes), values, 1)[0])
        summary = {"family": family, "models": len(members), "smallest": min(sizes), "largest": max(sizes)}
        rows.append({**summary, "slope": slope, "rises": spearman(sizes, values)})
    return rows


def _families(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for family, members in _grouped(models, "family"):
        for attention, alike in _grouped(members, "attention"):
            values = [row["symmetry"] for row in alike]
            heads = sum(row["heads"] for row in alike)
            summary = {"family": family, "attention": attention, "models": len(alike), "heads": heads}
            rows.append({**summary, "symmetry": median(values), "lowest": min(values), "highest": max(values)})
    return sorted(rows, key=lambda row: (-row["symmetry"], row["family"], row["attention"]))


def _grouped(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row[name]), []).append(row)
    return sorted(groups.items())
