"""Figures of the study: whether p-values of unrelated pairs are uniform, false alarms, ROC areas per kind."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from keyquery.instruments.lineage.evidence import LAYERS, p_value
from keyquery.instruments.lineage.lineage import LEVEL
from keyquery.support.extras import optional
from keyquery_studies.lineage.models import SIZES

TESTS = {"free": "basis-free", "shared": "shared basis"}
DEPTHS = {size.name: size.depth for size in SIZES}
MATCHINGS = 500  # random sets of pairs or models
Rows = Sequence[Mapping[str, Any]]


def nulls(rows: Rows) -> list[dict[str, Any]]:
    """Unrelated pairs: moments of the statistic, false alarms, and three tests of whether p-values are uniform.

    `ks_p` is Kolmogorov and Smirnov's test over all pairs, as if they were independent; they are not, since each model
    is in many pairs. `models_p` draws models, not pairs, with replacement: how often the distance to the distribution
    observed is as large as that to the uniform one. `disjoint_p` is twice the median of the tests over `MATCHINGS` sets
    of pairs that share no model, which is a valid p-value whatever the sets have in common; it has little power. `low`
    and `high` are the 95 % interval of the mean that so few pairs allow, by Student's t.
    """
    found = []
    for (config, kind), own in _grouped(rows, ("config", "set")).items():
        for name, test in TESTS.items():
            tested = [row for row in own if name in row]
            if len(tested) < 2:
                continue
            values = [row[name] for row in tested]
            p = np.array([p_value(test, value, DEPTHS.get(config, LAYERS)) for value in values])
            figures = {"mean": statistics.mean(values), "sd": statistics.stdev(values), "largest": max(values)}
            figures |= _interval(figures["mean"], figures["sd"], len(disjoint(tested, 1)[0]))
            figures |= {**uniformity(tested, p), "smallest_p": float(p.min()), "alarms": int((p < LEVEL).sum())}
            found.append({"config": config, "set": kind, "test": test, "pairs": len(values), **figures})
    return found


def _interval(mean: float, sd: float, pairs: int) -> dict[str, float]:
    if pairs < 2:
        return {"low": -math.inf, "high": math.inf}
    wide = float(optional("scipy.stats", "an interval").t.ppf(0.975, pairs - 1)) * sd / math.sqrt(pairs)
    return {"low": mean - wide, "high": mean + wide}


def uniformity(rows: Rows, p: Float[np.ndarray, " pairs"]) -> dict[str, float]:
    """The distance of p-values of pairs to the uniform distribution, and three p-values of it."""
    kolmogorov = optional("scipy.stats", "a KS test").kstest
    ks = kolmogorov(p, "uniform")
    apart = [kolmogorov(p[some], "uniform").pvalue for some in disjoint(rows, MATCHINGS)]
    return {
        "ks": float(ks.statistic),
        "ks_p": float(ks.pvalue),
        "models_p": _by_models(rows, p, float(ks.statistic)),
        "disjoint_p": min(2 * float(np.median(apart)), 1.0),
    }


def _by_models(rows: Rows, p: Float[np.ndarray, " pairs"], distance: float) -> float:
    """How often the distribution of p-values over models drawn with replacement is so far from that of all."""
    draw = np.random.default_rng(0)
    names = sorted({row[side] for row in rows for side in ("first", "second")})
    order = np.argsort(p, kind="stable")  # ties in the same order on every machine
    pairs = np.array([[names.index(row[side]) for side in ("first", "second")] for row in rows])[order]
    observed = np.arange(1, len(p) + 1) / len(p)
    larger = 0
    for _ in range(MATCHINGS):
        counts = draw.multinomial(len(names), np.full(len(names), 1 / len(names)))
        weights = counts[pairs].prod(1)
        larger += np.abs(weights.cumsum() / max(weights.sum(), 1) - observed).max() >= distance
    return float(larger) / MATCHINGS


def disjoint(rows: Rows, times: int) -> list[list[int]]:
    """Random sets of rows whose pairs share no model."""
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


def kinds(kin: Rows, null: Rows) -> list[dict[str, Any]]:
    """Per kind: both areas, how many are found at the level, medians of the change and of the increase in loss."""
    first = null[0]["config"]  # that of the bases from which models are made
    unrelated = {name: [r[name] for r in null if r["config"] == first and r["set"] == "test"] for name in TESTS}
    found = []
    for (kind,), rows in _grouped(kin, ("kind",)).items():
        row: dict[str, Any] = {"kind": kind, "models": len(rows)}
        for name in TESTS:
            values = [r[name] for r in rows if name in r]
            row |= {f"{name}_area": area(values, unrelated[name]), f"{name}_median": statistics.median(values)}
            row[f"{name}_found"] = sum(_found(r, name) for r in rows if name in r)
        row["found"] = sum(any(_found(r, name) for name in TESTS if name in r) for r in rows)
        moved = [r["change"] for r in rows if r["change"] is not None]
        row |= {"change": statistics.median(moved) if moved else None}
        row |= {"loss": statistics.median(r["loss"] - r["base_loss"] for r in rows)}
        row |= {"labels": dict(Counter(r["label"] for r in rows).most_common())}
        row |= {"merge": [round(statistics.mean(w), 3) for w in zip(*(r["merge"] for r in rows), strict=True)]}
        found.append(row)
    return found


def _found(row: Mapping[str, Any], name: str) -> bool:
    layers = len(row.get(f"{name}_path", ())) or LAYERS
    return p_value(TESTS[name], row[name], layers) < LEVEL


def area(related: Sequence[float], unrelated: Sequence[float]) -> float:
    """The area under the ROC curve: how often a related pair has the larger statistic."""
    first, second = np.asarray(related)[:, None], np.asarray(unrelated)[None]
    return float((first > second).mean() + (first == second).mean() / 2)


def _grouped(rows: Rows, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups
