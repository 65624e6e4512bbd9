"""Lineage in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keyquery.instruments.lineage.lineage import Lineage
from keyquery.instruments.lineage.significance import p_text
from keyquery.pages.components import column, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.support.printable import printable

MOVED = 10  # heads that moved most
STRONGEST = 8.0  # standard deviations at which a pair of layers has its full colour
CAVEAT = (
    "A match is evidence of shared weights, not of who copied whom, or of whether that was allowed. No match is no "
    "proof of independent work. Only queries and keys were compared."
)


def lines(reading: Lineage) -> list[Any]:
    """The label and its reasons, both tests, and where the models differ."""
    names = f"{printable(reading.theirs)} and {printable(reading.ours)}"
    lines: list[Any] = [Text(f"{names}: {reading.label}", style="bold")]
    lines += [Text(f"  {printable(reason)}") for reason in reading.reasons]
    if reading.tests:
        lines += ["", _tests(reading)]
    if reading.label == "fine-tuned" and reading.changes:
        lines += ["", _moved(reading)]
    return [*lines, "", CAVEAT]


def _tests(reading: Lineage) -> Any:
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


def _moved(reading: Lineage) -> Any:
    table = columns_table("moved most", "‖ΔM‖/‖M‖", "symmetric", "skew")
    rows = sorted(reading.changes, key=lambda row: -(row["change"] or 0.0))[:5]
    for row in rows:
        figures = ("–" if row[name] is None else f"{row[name]:.3g}" for name in ("change", "symmetric", "skew"))
        table.add_row(f"{row['layer']}.{row['head']}", *figures)
    return table


def page(reading: Lineage) -> str:
    """The page: the label and its reasons, both tests, all pairs of layers, and the similarity of matched heads."""
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [f"{reading.theirs} compared with {reading.ours}: {reading.label}."]},
        {"type": "list", "title": "Why", "items": list(reading.reasons), "none": "no reasons"},
    ]
    if reading.tests:
        blocks += [_test_table(reading), _layer_map(reading), *_heads(reading)]
    blocks += [*_changes(reading), *_merge(reading)]
    tab: dict[str, Any] = {"blocks": blocks}
    if reading.tests:
        tab |= {"frame": _frame(reading), "state": {"map": reading.tests[0]["test"]}}
    name, facts = f"{reading.theirs} and {reading.ours}", f"is {reading.theirs} made from {reading.ours}?"
    return document(name, "lineage", [tab], facts, versioned([CAVEAT], reading.provenance))


def _frame(reading: Lineage) -> dict[str, Any]:
    table = reading.tests[0]["table"]
    measures = [
        measure(
            test["test"],
            test["test"],
            [value for row in test["table"] for value in row],
            unit=f"standard deviations above the null, full colour from {STRONGEST:g}; the line is the best path",
            least=0,
            most=STRONGEST,
            path=list(test["path"]),
        )
        for test in reading.tests
        if len(test["table"]) == len(table) and len(test["table"][0]) == len(table[0])
    ]
    rows, columns = ([str(index) for index in range(count)] for count in (len(table), len(table[0])))
    nouns = ["layer of the first", "layer of the second"]
    return {"rows": rows, "columns": columns, "nouns": nouns, "join": "/", "measures": measures}


def _layer_map(reading: Lineage) -> dict[str, Any]:
    title = f"Layers of {reading.ours} (rows) by layers of {reading.theirs}"
    return {"type": "map", "place": "half", "title": title, "plane": True, "cell": 48, "edge": 28, "most": 480}


def _test_table(reading: Lineage) -> dict[str, Any]:
    names = layer_names(reading, "ours")
    columns = [
        column("test", [test["test"] for test in reading.tests]),
        column("statistic (sd of the null)", [test["statistic"] for test in reading.tests]),
        column("p", [p_text(test["p"]) for test in reading.tests]),
        column("source of each layer", [runs(test["path"], names) for test in reading.tests]),
    ]
    return {"type": "table", "title": "Both tests", "columns": columns}


def _heads(reading: Lineage) -> list[dict[str, Any]]:
    """The similarity of every head of the second model with its source, by both tests."""
    by_test = [[value for row in test["similarity"] for value in row] for test in reading.tests]
    if len(by_test) < 2:
        return []
    first, second = by_test[:2]
    names = [f"{layer}.{head}" for layer, row in enumerate(reading.tests[0]["similarity"]) for head in range(len(row))]
    series = [{"name": "heads", "tone": "var(--above)", "x": first, "values": second, "items": names}]
    note = "cosine of each head of the second model with its source, gaps of spectra (across) by QK forms (up); "
    chart = {
        "type": "curve",
        "place": "half",
        "title": "Heads",
        "note": note + "unrelated heads lie near the lower left",
    }
    return [
        {
            **chart,
            "series": series,
            "dots": True,
            "joined": False,
            "least": 0,
            "most": 1,
            "xs": [0, 0.5, 1],
            "tall": 320,
        }
    ]


def _changes(reading: Lineage) -> list[dict[str, Any]]:
    rows = sorted(reading.changes, key=lambda row: -(row["change"] or 0.0))
    if not any(row["change"] for row in rows):
        return []
    columns = [column("head", [f"{row['layer']}.{row['head']}" for row in rows])]
    columns += [
        column(label, [row[name] for row in rows])
        for name, label in (("change", "‖ΔM‖/‖M‖"), ("symmetric", "symmetric"), ("skew", "skew"))
    ]
    return [{"type": "table", "place": "half", "title": "Heads that moved most", "columns": columns, "top": MOVED}]


def _merge(reading: Lineage) -> list[dict[str, Any]]:
    if not reading.merge:
        return []
    columns = [
        column("model", [str(row["model"]) for row in reading.merge]),
        column("weight", [row["weight"] for row in reading.merge]),
    ]
    return [{"type": "table", "place": "half", "title": "Estimated weights of a merge", "columns": columns}]
