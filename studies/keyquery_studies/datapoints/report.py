"""The study of datapoints as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.pages.colours import KERNELS
from keyquery.pages.tables import columns_table
from keyquery_studies.datapoints.figure import CALLED, TITLES, between, claimed
from keyquery_studies.datapoints.lookups import DEVIATION, PUBLISHED, VARIANTS
from keyquery_studies.datapoints.study import GROWTH, DatapointStudy
from keyquery_studies.datapoints.tables import TABLES

NEAREST = "nearest neighbour"
SHARES = ("symmetric", "on_data")
# Titles of columns: which figure, to how many places, in which unit.
NUMBERS: dict[str, tuple[Any, ...]] = {"RMSE": ("rmse", 2)}
CLASSES: dict[str, tuple[Any, ...]] = {"accuracy %": ("accuracy", 1, 100.0), "AUROC": ("auroc", 3), "NLL": ("nll", 3)}


def lines(reading: DatapointStudy) -> list[Any]:
    """Errors by table and model, effect of other rows, kernels, and look-ups; interrupted trainings."""
    rows, shown = reading.summary(), list[Any]()
    parts = {part: [row for row in rows if row["part"] == part] for part in ("npt", "baselines", "kernels")}
    for title, lines in (
        ("test error per table: mean ± standard error over folds", _errors(parts["npt"] + parts["baselines"])),
        ("other rows corrupted, and cross-row heads", _rows(parts["npt"])),
        (
            "kernels of cross-row attention",
            _figures(parts["kernels"], {kernel: kernel for kernel in KERNELS}, "kernel"),
        ),
        ("target look-up: RMSE in standard deviations", _lookups(reading.lookup)),
    ):
        if lines:
            shown += [*([""] if shown else []), Text(title, style="bold"), *lines]
    broken = sum(bool(row.get("partial")) for row in (*reading.npt, *reading.kernels, *reading.baselines))
    left = f"{broken} training{'s are' if broken > 1 else ' is'} not finished: the same command resumes."
    return [*shown, *([left] if broken else [])]


def _errors(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    note = "published: test rows are in the table, all targets masked. inductive: unseen, predicted one by one."
    return [*_figures(rows, CALLED, "model"), note] if rows else []


def _figures(rows: Sequence[Mapping[str, Any]], models: Mapping[str, str], what: str) -> list[Any]:
    """One table of regression and one of classification, each with published results where there are any."""
    shown: list[Any] = []
    for classes in (False, True):
        names = [name for name in TABLES if TABLES[name].classes == classes and any(r["table"] == name for r in rows)]
        if not names:
            continue
        figures = CLASSES if classes else NUMBERS
        table = _left(columns_table("table", what, "folds", *figures, *([] if what == "kernel" else ["published"])), 2)
        for name in names:
            by_model = {row["model"]: row for row in rows if row["table"] == name}
            for model in (model for model in models if model in by_model):
                cells = [_mean(by_model[model], *how) for how in figures.values()]
                claims = [] if what == "kernel" else [_claim(name, model)]
                table.add_row(TITLES[name], models[model], str(by_model[model]["folds"]), *cells, *claims)
        shown.append(table)
    return shown


def _claim(name: str, model: str) -> str:
    """The one figure that was published of this model: RMSE or, of classes, AUROC."""
    published = claimed(name, model)
    return _mean(published, "rmse", 2) if "rmse" in published else _mean(published, "auroc", 3)


def _mean(row: Mapping[str, Any], name: str, places: int, unit: float = 1.0) -> str:
    if row.get(name) is None:
        return "–"
    spread = row.get(f"{name}_se")
    return f"{unit * row[name]:z.{places}f}" + ("" if spread is None else f" ± {unit * spread:.{places}f}")


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    if not rows:
        return []
    table = _left(columns_table("table", "model", "error grows %", "published", "symmetric %", "on data %"), 2)
    for name in TABLES:
        for row in sorted(
            (row for row in rows if row["table"] == name), key=lambda row: list(CALLED).index(row["model"])
        ):
            claim = f"{100 * GROWTH[name]:.0f}" if name in GROWTH else "–"
            shares = [_mean(row, of, 1, 100) + f" ({_mean(row, f'{of}_at_start', 1, 100)})" for of in SHARES]
            table.add_row(TITLES[name], CALLED[row["model"]], _mean(row, "grows", 1, 100), claim, *shares)
    return [
        table,
        "error grows: RMSE, or points of accuracy lost. symmetric: ‖S‖²/‖M‖² of heads' weights; on data: the "
        "symmetric share of their scores on the table; in brackets, before training.",
    ]


def _lookups(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    there = [row for row in rows if not row.get("partial")]
    if not there:
        return []
    table = _left(columns_table("table is", "attention", "r", "RMSE", NEAREST, "published", NEAREST), 2)
    for variant in VARIANTS:
        for row in (row for row in there if row["variant"] == variant):
            claims = [f"{value / DEVIATION:.2f}" for value in PUBLISHED[variant]] if row["rows"] == "full" else ["", ""]
            attention = "between rows" if row["rows"] == "full" else "none"
            figures = [f"{row['r']:z.3f}", f"{row['rmse']:.3f}", f"{row['nearest']['rmse']:.2f}"]
            table.add_row(variant, attention, *figures, *claims)
    return [table, "published: on Protein, over the standard deviation of its target."]


def _left(table: Table, count: int) -> Table:
    """The first columns hold words."""
    for column in table.columns[:count]:
        column.justify, column.no_wrap = "left", True
    return table


FIGURES = {"between": between}
