"""Statistics of pairs of models, in processes: checkpoints in, rows out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import keyquery as kq
from keyquery.instruments.lineage.evidence import basis_free, shared_basis
from keyquery.instruments.lineage.fingerprint import PERMUTATIONS, Fingerprint, fingerprint
from keyquery.instruments.lineage.weight_change import weight_change

NAMES = {"basis-free": "free", "shared basis": "shared"}


@lru_cache(maxsize=256)
def _print(folder: Path) -> Fingerprint:
    return fingerprint(kq.read(folder), PERMUTATIONS)


def unrelated(folder: Path, pairs: Sequence[tuple[str, str]], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both statistics of each pair of checkpoints in a folder."""
    torch.set_num_threads(1)
    rows = []
    for first, second in pairs:
        tests = [test(_print(folder / first), _print(folder / second)) for test in (basis_free, shared_basis)]
        found = {NAMES[test.test]: round(test.statistic, 4) for test in tests if test is not None}
        rows.append({**facts, "first": first, "second": second, **found})
    return rows


def kin(
    folder: Path, source: str, derived: str, others: Sequence[str], start: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole analysis of one pair, and the change from the model `start` of the training."""
    torch.set_num_threads(1)
    pair = folder / source, folder / derived
    reading = kq.lineage(*pair, [folder / other for other in others])
    found: dict[str, Any] = {}
    for test in reading.tests:
        name = NAMES[test["test"]]
        found |= {name: round(test["statistic"], 4), f"{name}_path": test["path"]}
    change = weight_change(kq.read(folder / start), kq.read(pair[1]))  # also where no test finds the models related
    moved = [row["change"] for row in change.rows if row["change"] is not None] if change else []
    found |= {"change": round(statistics.median(moved), 6) if moved else None, "label": reading.label}
    return {**facts, **found, "merge": [round(row["weight"], 4) for row in reading.merge]}
