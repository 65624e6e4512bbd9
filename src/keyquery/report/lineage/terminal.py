"""Lineage in the terminal: the label, both tests, the map of layers, and the heads that moved most."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.lineage.lineage import Lineage
from keyquery.report.kit.tables import columns_table
from keyquery.support.printable import printable

CAVEAT = "A match is evidence of shared weights, not of who copied whom. Only queries and keys were compared."


def lineage_lines(reading: Lineage) -> list[Any]:
    """The label and its reasons, both tests, and where the models differ."""
    names = f"{printable(reading.theirs)} and {printable(reading.ours)}"
    lines: list[Any] = [Text(f"{names}: {reading.label}", style="bold")]
    lines += [Text(f"  {printable(reason)}") for reason in reading.reasons]
    if reading.tests:
        lines += ["", _tests(reading)]
    if reading.label == "fine-tuned" and reading.changes:
        lines += ["", _moved(reading)]
    return [*lines, "", CAVEAT]


def _tests(reading: Lineage) -> Table:
    table = columns_table("test", "statistic", "p", "source of each layer")
    for test in reading.tests:
        p = f"{test['p']:.1e}" if test["p"] > 0 else "0"
        table.add_row(test["test"], f"{test['statistic']:.1f}", p, _path(test["path"]))
    return table


def _path(path: list[int]) -> str:
    """Runs of layers, as "0-3, 2-5"."""
    runs: list[list[int]] = []
    for layer in path:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs)


def _moved(reading: Lineage) -> Table:
    table = columns_table("moved most", "‖ΔM‖/‖M‖", "symmetric", "skew")
    rows = sorted(reading.changes, key=lambda row: -(row["change"] or 0.0))[:5]
    for row in rows:
        figures = ("–" if row[name] is None else f"{row[name]:.3g}" for name in ("change", "symmetric", "skew"))
        table.add_row(f"{row['layer']}.{row['head']}", *figures)
    return table
