"""Lineage in the terminal: the label, both tests, the map of layers, and the heads that moved most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.lineage.index import Relatives
from keyquery.instruments.lineage.lineage import Lineage
from keyquery.instruments.lineage.significance import p_text
from keyquery.pages.tables import columns_table
from keyquery.support.printable import printable

SHOWN = 10  # relatives
CAVEAT = (
    "A match is evidence of shared weights, not of who copied whom, or of whether that was allowed. No match is no "
    "proof of independent work. Only queries and keys were compared."
)


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
    names = layer_names(reading, "ours")
    for test in reading.tests:
        table.add_row(test["test"], f"{test['statistic']:.1f}", p_text(test["p"]), runs(test["path"], names))
    return table


def layer_names(reading: Lineage, side: str) -> list[str]:
    """The labels of the layers that were compared, as the checkpoint numbers them."""
    labels = reading.provenance.get(side, {}).get("labels")
    return [printable(labels[index]) if labels else str(index) for index in reading.layers[side]]


def runs(path: Sequence[int], names: Sequence[str]) -> str:
    """Runs of layers."""
    found: list[list[int]] = []
    for layer in path:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(f"{names[low]}-{names[high]}" if high > low else names[low] for low, high in found)


def relatives_lines(reading: Relatives) -> list[Any]:
    """The nearest models of an index."""
    facts = f"{reading.searched} searched, {reading.comparable} of a comparable shape"
    lines: list[Any] = [Text(f"relatives of {printable(reading.model)}: {facts}", style="bold")]
    table = columns_table("model", "related", "p (adjusted)", "basis-free", "shared basis")
    for row in reading.rows[:SHOWN]:
        statistics = ("–" if row[name] is None else f"{row[name]:.1f}" for name in ("basis_free", "shared_basis"))
        table.add_row(printable(row["model"]), "yes" if row["related"] else "no", p_text(row["p"]), *statistics)
    return [*lines, table, "", CAVEAT] if reading.rows else [*lines, "", CAVEAT]


def _moved(reading: Lineage) -> Table:
    table = columns_table("moved most", "‖ΔM‖/‖M‖", "symmetric", "skew")
    rows = sorted(reading.changes, key=lambda row: -(row["change"] or 0.0))[:5]
    for row in rows:
        figures = ("–" if row[name] is None else f"{row[name]:.3g}" for name in ("change", "symmetric", "skew"))
        table.add_row(f"{row['layer']}.{row['head']}", *figures)
    return table
