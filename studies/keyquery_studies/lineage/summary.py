"""Figures of the study: calibration on one half of the bases, false alarms on the other, ROC areas per kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.instruments.lineage.evidence import FREEDOM, p_value
from keyquery.instruments.lineage.lineage import LEVEL
from keyquery.support.extras import optional
from keyquery.support.statistics import student_tail

TESTS = {"free": "basis-free", "shared": "shared basis"}
Rows = Sequence[Mapping[str, Any]]


def nulls(rows: Rows) -> list[dict[str, Any]]:
    """Unrelated pairs. `ks` and `ks_p`: the Kolmogorov-Smirnov test of p-values that the calibration half gives.

    Pairs that share a model depend on each other, which makes `ks_p` too small; `disjoint_p` is its median over random
    sets of pairs that share none.
    """
    kolmogorov = optional("scipy.stats", "a KS test").kstest
    halves = {name: _fit([row[name] for row in rows if row["set"] == "calibrate"]) for name in TESTS}
    found = []
    for (config, kind), own in _grouped(rows, ("config", "set")).items():
        for name, test in TESTS.items():
            values = [row[name] for row in own if name in row]
            mean, spread = halves[name]
            fitted = [student_tail((value - mean) / spread, FREEDOM) for value in values]
            shipped = [p_value(test, value) for value in values]
            ks = kolmogorov(fitted, "uniform")
            apart = [kolmogorov([fitted[i] for i in some], "uniform").pvalue for some in disjoint(own, 200)]
            figures = {"mean": statistics.mean(values), "sd": statistics.stdev(values), "largest": max(values)}
            figures |= {"ks": float(ks.statistic), "ks_p": float(ks.pvalue), "disjoint_p": statistics.median(apart)}
            figures |= {"smallest_p": min(shipped), "alarms": sum(p < LEVEL for p in shipped)}
            found.append({"config": config, "set": kind, "test": test, "pairs": len(values), **figures})
    return found


def disjoint(rows: Rows, times: int) -> list[list[int]]:
    """Random sets of rows whose pairs share no model.

    >>> pairs = [{"first": "a", "second": "b"}, {"first": "a", "second": "c"}]
    >>> sorted(disjoint(pairs, 2)[0]) in ([0], [1])
    True
    """
    draw = np.random.default_rng(0)
    found = []
    for _ in range(times):
        used: set[str] = set()
        kept = []
        for i in draw.permutation(len(rows)).tolist():
            pair = {rows[i]["first"], rows[i]["second"]}
            if not pair & used:
                used |= pair
                kept.append(i)
        found.append(kept)
    return found


def _fit(values: Sequence[float]) -> tuple[float, float]:
    """Mean and scale of a Student distribution with the moments of the values."""
    return statistics.mean(values), statistics.stdev(values) * ((FREEDOM - 2) / FREEDOM) ** 0.5


def kinds(kin: Rows, null: Rows) -> list[dict[str, Any]]:
    """Per kind: both areas, how many are found at the level, medians of the change and of the increase in loss."""
    first = null[0]["config"]
    unrelated = {name: [r[name] for r in null if r["config"] == first and r["set"] == "test"] for name in TESTS}
    found = []
    for (kind,), rows in _grouped(kin, ("kind",)).items():
        row: dict[str, Any] = {"kind": kind, "models": len(rows)}
        for name in TESTS:
            values = [r[name] for r in rows if name in r]
            row |= {f"{name}_area": area(values, unrelated[name]), f"{name}_median": statistics.median(values)}
            row[f"{name}_found"] = sum(p_value(TESTS[name], value) < LEVEL for value in values)
        row["found"] = sum(min(p_value(t, r[n]) for n, t in TESTS.items() if n in r) < LEVEL for r in rows)
        moved = [r["change"] for r in rows if r["change"] is not None]
        row |= {"change": statistics.median(moved) if moved else None}
        row |= {"loss": statistics.median(r["loss"] - r["base_loss"] for r in rows)}
        row |= {"labels": dict(Counter(r["label"] for r in rows).most_common())}
        row |= {"merge": [round(statistics.mean(w), 3) for w in zip(*(r["merge"] for r in rows), strict=True)]}
        found.append(row)
    return found


def area(related: Sequence[float], unrelated: Sequence[float]) -> float:
    """The area under the ROC curve: how often a related pair has the larger statistic.

    >>> area([2.0, 3.0], [0.0, 2.0])
    0.875
    """
    first, second = np.asarray(related)[:, None], np.asarray(unrelated)[None]
    return float((first > second).mean() + (first == second).mean() / 2)


def _grouped(rows: Rows, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups
