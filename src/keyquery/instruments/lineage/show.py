"""Lineage in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keyquery.instruments.lineage.evidence import p_text
from keyquery.instruments.lineage.lineage import Lineage
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
    """The label and its reasons, and both tests."""
    names = f"{printable(reading.theirs)} and {printable(reading.ours)}"
    lines: list[Any] = [Text(f"{names}: {reading.label}", style="bold")]
    lines += [Text(f"  {printable(reason)}") for reason in reading.reasons]
    if reading.tests:
        table = columns_table("test", "statistic", "p", "source of each layer")
        for test in reading.tests:
            table.add_row(test["test"], f"{test['statistic']:.1f}", p_text(test["p"]), _source(reading, test))
        lines += ["", table]
    return [*lines, "", CAVEAT]


def _source(reading: Lineage, test: Mapping[str, Any]) -> str:
    """Runs of layers of the first model, as its checkpoint numbers them."""
    labels = reading.provenance.get("ours", {}).get("labels")
    names = [printable(labels[index]) if labels else str(index) for index in reading.layers["ours"]]
    runs: list[list[int]] = []
    for layer in test["path"]:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{names[low]}-{names[high]}" if high > low else names[low] for low, high in runs)


def page(reading: Lineage) -> str:
    """The page: the label and its reasons, both tests, all pairs of layers, and the similarity of matched heads."""
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [f"{reading.theirs} compared with {reading.ours}: {reading.label}."]},
        {"type": "list", "title": "Why", "items": list(reading.reasons), "none": "no reasons"},
    ]
    tab: dict[str, Any] = {"blocks": blocks}
    if reading.tests:
        columns = {
            "test": [test["test"] for test in reading.tests],
            "statistic (sd of the null)": [test["statistic"] for test in reading.tests],
            "p": [p_text(test["p"]) for test in reading.tests],
            "source of each layer": [_source(reading, test) for test in reading.tests],
        }
        blocks.append(_table("Both tests", columns))
        title = f"Layers of {reading.ours} (rows) by layers of {reading.theirs}"
        size = {"cell": 48, "edge": 28, "most": 480}
        blocks.append({"type": "map", "place": "half", "title": title, "plane": True, **size})
        blocks += _heads(reading.tests)
        tab |= {"frame": _frame(reading), "state": {"map": reading.tests[0]["test"]}}
    moved = sorted(reading.changes, key=lambda row: -(row["change"] or 0.0))
    if any(row["change"] for row in moved):
        columns = {"head": [f"{row['layer']}.{row['head']}" for row in moved]}
        names = {"change": "‖ΔM‖/‖M‖", "symmetric": "symmetric", "skew": "skew"}
        columns |= {label: [row[name] for row in moved] for name, label in names.items()}
        blocks.append(_table("Heads that moved most", columns, place="half", top=MOVED))
    if reading.merge:
        columns = {name: [row[name] for row in reading.merge] for name in ("model", "weight")}
        blocks.append(_table("Estimated weights of a merge", columns, place="half"))
    name, facts = f"{reading.theirs} and {reading.ours}", f"is {reading.theirs} made from {reading.ours}?"
    return document(name, "lineage", [tab], facts, versioned([CAVEAT], reading.provenance))


def _table(title: str, columns: Mapping[str, Sequence[Any]], **options: Any) -> dict[str, Any]:
    return {"type": "table", "title": title, "columns": [column(*pair) for pair in columns.items()], **options}


def _frame(reading: Lineage) -> dict[str, Any]:
    table = reading.tests[0]["table"]
    unit = f"standard deviations above the null, full colour from {STRONGEST:g}; the line is the best path"
    measures = []
    for test in reading.tests:
        values = [value for row in test["table"] for value in row]
        name, path = test["test"], list(test["path"])
        measures.append(measure(name, name, values, unit=unit, least=0, most=STRONGEST, path=path))
    rows, columns = ([str(index) for index in range(count)] for count in (len(table), len(table[0])))
    nouns = ["layer of the first", "layer of the second"]
    return {"rows": rows, "columns": columns, "nouns": nouns, "join": "/", "measures": measures}


def _heads(tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The similarity of every head of the second model with its source, by both tests."""
    if len(tests) < 2:
        return []
    first, second = ([value for row in test["similarity"] for value in row] for test in tests)
    names = [f"{layer}.{head}" for layer, row in enumerate(tests[0]["similarity"]) for head in range(len(row))]
    note = "cosine of each head of the second model with its source, gaps of spectra (across) by QK forms (up); "
    axes = {"least": 0, "most": 1, "xs": [0, 0.5, 1], "tall": 320}
    series = [{"name": "heads", "tone": "var(--above)", "x": first, "values": second, "items": names}]
    chart = {"type": "curve", "place": "half", "title": "Heads", "dots": True, "joined": False, **axes}
    return [{**chart, "note": note + "unrelated heads lie near the lower left", "series": series}]
