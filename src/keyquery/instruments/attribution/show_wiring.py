"""Wirings in the terminal, as a figure and as a page: which earlier heads feed the queries and keys of every head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyquery.instruments.attribution.wiring import SIDES, Wiring
from keyquery.pages.components import DIGITS, versioned
from keyquery.pages.document import document
from keyquery.pages.figures import signed_map
from keyquery.pages.packing import pack
from keyquery.pages.tables import Text, columns_table
from keyquery.reading import short
from keyquery.support.checks import check_choice

HEADS = 24  # heads that are listed
SOURCES = 3  # sources that are listed of a side
AROUND = 6  # tokens around the query and the key of an example


def lines(reading: Wiring) -> list[Any]:
    """The heads with the clearest single source, and their largest sources on both sides."""
    table = columns_table("head", Text("queries from"), "null", Text("keys from"), "null")
    cells = _fed_by_heads(reading)
    order = dict.fromkeys([cell["head"] for cell in cells] + [head["name"] for head in reading.heads])
    for name in list(order)[:HEADS]:
        row: list[Any] = []
        for side in SIDES:
            clear = [cell for cell in reading.of(name, side) if cell["clear"]][:SOURCES]
            shares = (f"{c['source']} {c['share']:.0%} ±{(c['high'] - c['low']) / 2:.0%}" for c in clear)
            row += [Text(", ".join(shares) or "–"), f"{clear[0]['null']:.0%}" if clear else ""]
        table.add_row(name, *row)
    counted = f"{reading.sequences} sequences, {reading.tokens} tokens"
    listed = f" The {HEADS} of {len(order)} heads most fed by one head." if len(order) > HEADS else ""
    return [
        Text(headline(reading), style="bold"),
        Text(f"{reading.model['name']}: shares of score variance by source, {counted}", style="dim"),
        "",
        table,
        "",
        "Sources above their null, with 95 % intervals; shares sum to 1, and may be negative. null: the share "
        f"of the first with its tokens shuffled, upper end.{listed}",
        *(f"Note: {note}." for note in reading.notes),
    ]


def _fed_by_heads(reading: Wiring) -> list[dict[str, Any]]:
    """All clear shares of one head in another, largest first."""
    rows = [row for row in reading.records() if row["clear"] and row["source"].rpartition(".")[2].isdecimal()]
    return sorted(rows, key=lambda row: -row["share"])


def headline(reading: Wiring) -> str:
    """The head that is fed most clearly by one other head."""
    cells = _fed_by_heads(reading)
    if not cells:
        return f"None of {len(reading.heads)} heads is clearly fed by one other head."
    cell = cells[0]
    side = {"query": "queries", "key": "keys"}[cell["side"]]
    null = f"against {cell['null']:.0%} with its tokens shuffled"
    return f"{cell['head']} reads its {side} from {cell['source']}: {cell['share']:.0%} of its score variance, {null}"


def wiring_map(reading: Wiring, pyplot: Any, side: str = "key") -> Any:
    """Sources by heads: shares of score variance on one side; cells within their null are left white."""
    check_choice("side", side, SIDES)
    values = grid(reading, side)
    share, low, null = (np.nan_to_num(values[name]) for name in ("share", "low", "null"))
    sources = all_sources(reading)
    size = (4 + 0.024 * share.shape[1], 3 + 0.02 * len(sources))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    label = f"share of the score variance, {side} side"
    signed_map(axis, np.where(low > null, share, 0.0), shrink=0.8, label=label)
    starts = [i for i, head in enumerate(reading.heads) if i == 0 or head["layer"] != reading.heads[i - 1]["layer"]]
    every = max(1, len(starts) // 10)
    axis.set_xticks(starts[::every], [reading.heads[i]["layer"] for i in starts[::every]])
    step = max(1, len(sources) // 25)
    axis.set_yticks(range(0, len(sources), step), sources[::step])
    axis.set(xlabel="heads, by layer", ylabel="source")
    figure.suptitle(str(reading.model["name"]), weight="bold")
    return figure


FIGURES = {"map": wiring_map}


def all_sources(reading: Wiring) -> list[str]:
    """The sources of all layers."""
    return list(dict.fromkeys(source for layer in reading.layers for source in layer["sources"]))


def grid(reading: Wiring, side: str) -> dict[str, np.ndarray]:
    """Shares on one side, intervals and null levels, (sources, heads); NaN where a source comes later."""
    row_of = {source: index for index, source in enumerate(all_sources(reading))}
    rows = {layer["layer"]: [row_of[source] for source in layer["sources"]] for layer in reading.layers}
    values = {name: np.full((len(row_of), len(reading.heads)), np.nan) for name in ("share", "low", "high", "null")}
    for index, head in enumerate(reading.heads):
        for name, table in values.items():
            table[rows[head["layer"]], index] = head[side][name]
    return values


def page(reading: Wiring) -> str:
    """A map of sources by heads on either side; a cell shows its interval, its null and examples."""
    measures = []
    for side in ("key", "query"):
        packed = {"values" if name == "share" else name: pack(table) for name, table in grid(reading, side).items()}
        unit = "coloured: share of the score variance above the shuffled null"
        label = {"key": side, "label": f"{side} side", "unit": unit, "form": "percent", "above": True}
        measures.append({**label, **packed})
    names = [head["name"] for head in reading.heads]
    axes = {"rows": all_sources(reading), "columns": names, "nouns": ["source", "head"], "join": "/"}
    cells = _fed_by_heads(reading) or sorted(reading.records(), key=lambda row: -row["share"])
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [headline(reading)]},
        {"type": "map", "title": "Sources by heads", "plane": True, "pickers": True, "quick": ["key", "query"]},
        {"type": "strip", "by": ["map", "at"], "views": _examples(reading)},
        {"type": "sources", "place": "half", "measure": "query", "title": "Queries from"},
        {"type": "sources", "place": "half", "measure": "key", "title": "Keys from"},
    ]
    state = {"at": f"{cells[0]['source']}/{cells[0]['head']}", "map": cells[0]["side"]}
    tab = {"frame": {**axes, "measures": measures}, "state": state, "blocks": blocks}
    facts = f"{len(reading.heads)} heads · {reading.sequences} sequences · {reading.tokens} tokens"
    note = "Examples are kept for the three largest sources of each head and side above their null"
    notes = versioned([*reading.notes, note], reading.provenance)
    return document(str(reading.model["name"]), "wiring", [tab], facts, notes)


def _examples(reading: Wiring) -> dict[str, Any]:
    """Pairs of tokens where a source adds most, by side and cell."""
    shown = {}
    for example in reading.examples:
        texts = [_window(reading.texts[pair["sequence"]], pair) for pair in short(list(example["pairs"]), DIGITS)]
        title = f"Where {example['source']} adds most, relative to the mean visible key"
        block = {"title": title, "note": "orange: query; blue: key", "texts": texts}
        shown[f"{example['side']}/{example['source']}/{example['head']}"] = block
    return shown


def _window(text: Any, pair: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens around a query and a key; those in between are left out."""
    query, key = pair["query"], pair["key"]
    near = [i for i in range(len(text)) if min(abs(i - query), abs(i - key)) <= AROUND]
    tokens: list[Any] = []
    marks = {}
    for before, i in zip([None, *near], near, strict=False):
        if before is not None and i > before + 1:
            tokens.append(None)
        if i in (query, key):
            marks[len(tokens)] = "key-token" if i == key else "query"
        tokens.append(text[i])
    return {"before": f"{pair['relative']:+z.2f} from {query} to {key}:", "tokens": tokens, "marks": marks}
