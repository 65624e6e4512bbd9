"""Paired comparisons of the study: protocols and models, the two factors of the grid, and corrupted rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from keyquery_studies.common.comparisons import corrected, difference

Rows = Sequence[Mapping[str, Any]]
OTHERS = ("boosting", "neighbours", "perceptron")
# Each factor of the grid: the two cells (transductive, masked) whose mean is compared with that of the other two.
FACTORS = {
    "test rows present": ((True, False), (True, True)),
    "targets masked": ((False, True), (True, True)),
    "interaction": ((True, True), (False, False)),
}


def contrasts(npt: Rows, baselines: Rows, grid: Rows) -> list[dict[str, Any]]:
    """All comparisons, named by `of`, within which p is corrected: models, grid, corrupted (growth of RMSE in %)."""
    tables = list(dict.fromkeys(row["table"] for row in npt))
    models, grown = [], []
    for table in tables:
        name = "nll" if table == "breast" else "rmse"
        arms: dict[str, list[dict[str, Any]]] = {}
        for row in (*npt, *baselines):
            if row["table"] == table and not row.get("partial"):
                arms.setdefault(row.get("model") or row["protocol"], []).append({**row, "seed": row["fold"]})
        pairs = [("inductive", "published"), *((p, m) for m in OTHERS for p in ("inductive", "published"))]
        for one, other in pairs:
            if arms.get(one) and arms.get(other):
                of = {"of": "models", "table": table, "arm": one, "less": other}
                models.append(of | difference(arms[one], arms[other], name))
        for protocol in ("published", "inductive"):
            if name == "rmse" and arms.get(protocol):
                of = {"of": "corrupted", "table": table, "arm": protocol, "less": "clean"}
                grown.append(of | _growth(arms[protocol]))
    factors = [row for table in dict.fromkeys(row["table"] for row in grid) for row in _factors(grid, table)]
    return [*corrected(models), *corrected(factors), *corrected(grown)]


def _growth(rows: Rows) -> dict[str, Any]:
    ratios = [100 * (row["corrupted"]["rmse"] / row["clean"]["rmse"] - 1) for row in rows]
    after = [{"seed": row["fold"], "growth": ratio} for row, ratio in zip(rows, ratios, strict=True)]
    return difference(after, [{**row, "growth": 0.0} for row in after], "growth")


def _factors(grid: Rows, table: str) -> list[dict[str, Any]]:
    """The effect of each factor on RMSE, over the folds that have all four cells."""
    cells: dict[int, dict[tuple[bool, bool], float]] = {}
    for row in grid:
        if row["table"] == table and not row.get("partial"):
            cells.setdefault(row["fold"], {})[row["transductive"], row["masked"]] = row["rmse"]
    whole = {fold: cell for fold, cell in cells.items() if len(cell) == 4}
    rows = []
    for factor, with_it in FACTORS.items():
        sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        for fold, cell in whole.items():
            for side, chosen in zip(sides, (True, False), strict=True):
                values = [value for key, value in cell.items() if (key in with_it) is chosen]
                side.append({"seed": fold, "rmse": fmean(values)})
        if whole:
            of = {"of": "grid", "table": table, "arm": factor, "less": "without"}
            rows.append(of | difference(*sides, "rmse"))
    return rows
