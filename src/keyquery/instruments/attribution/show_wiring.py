"""Wirings in the terminal, as a figure and as a page: which earlier heads feed the queries and keys of every head."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.attribution.show import source_map
from keyquery.instruments.attribution.wiring import SIDES, Wiring
from keyquery.pages.components import DIGITS, versioned
from keyquery.pages.document import document
from keyquery.pages.packing import pack
from keyquery.pages.tables import Text, columns_table
from keyquery.reading import short
from keyquery.support.checks import check_choice

HEADS = 24  # heads that are listed
AROUND = 6  # tokens around the query and the key of an example


def lines(reading: Wiring) -> list[Any]:
    """The heads with the clearest single source, and their largest sources on both sides."""
    rows = _by_feeding_head(reading)
    lines: list[Any] = [Text(headline(reading), style="bold")]
    counted = f"{reading.sequences} sequences, {reading.tokens} tokens"
    lines += [Text(f"{reading.model['name']}: shares of score variance by source, {counted}", style="dim"), ""]
    table = columns_table("head", Text("queries from"), "null", Text("keys from"), "null")
    for _, name, sides in rows[:HEADS]:
        table.add_row(name, *(cell for side in sides for cell in _listed(side)))
    lines += [
        table,
        "",
        "Sources above their null, with 95 % intervals; shares sum to 1, and may be negative. null: the share "
        "of the first with its tokens shuffled, upper end.",
    ]
    if len(rows) > HEADS:
        lines.append(f"The {HEADS} of {len(rows)} heads most fed by one head; --csv or --json for all.")
    return [*lines, *(f"Note: {note}." for note in reading.notes)]


def _by_feeding_head(reading: Wiring) -> list[tuple[float, str, list[list[dict[str, Any]]]]]:
    """The heads by their largest clear share from one head: the share, the name, and the sources of both sides."""
    rows = []
    for head in reading.heads:
        sides = [reading.of(head["name"], side) for side in ("query", "key")]
        heads = [row["share"] for side in sides for row in side if row["clear"] and _is_head(row["source"])]
        rows.append((max(heads, default=0.0), head["name"], sides))
    return sorted(rows, key=lambda row: -row[0])


def headline(reading: Wiring) -> str:
    """The head that is fed most clearly by one other head."""
    share, name, sides = _by_feeding_head(reading)[0]
    if share <= 0:
        return f"None of {len(reading.heads)} heads is clearly fed by one other head."
    side, cell = _fed_by_head(sides)
    null = f"against {cell['null']:.0%} with its tokens shuffled"
    return f"{name} reads its {side} from {cell['source']}: {share:.0%} of its score variance, {null}"


def _is_head(source: str) -> bool:
    return source.rpartition(".")[2].isdecimal() and "." in source


def _fed_by_head(sides: list[list[dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    cells = [
        (name, row)
        for name, side in zip(("queries", "keys"), sides, strict=True)
        for row in side
        if row["clear"] and _is_head(row["source"])
    ]
    return max(cells, key=lambda cell: cell[1]["share"])


def _listed(side: list[dict[str, Any]], most: int = 3) -> tuple[Text, str]:
    """The largest sources above their null, and the null level of the first."""
    clear = [row for row in side if row["clear"]][:most]
    shares = (f"{row['source']} {row['share']:.0%} ±{(row['high'] - row['low']) / 2:.0%}" for row in clear)
    return Text(", ".join(shares) or "–"), f"{clear[0]['null']:.0%}" if clear else ""


def wiring_map(reading: Wiring, pyplot: Any, side: str = "key") -> Any:
    """Sources by heads: shares of score variance on one side; cells within their null are left white."""
    check_choice("side", side, SIDES)
    sources, values = wiring_grid(reading, side)
    figure, axis = pyplot.subplots(
        figsize=(2 + 0.024 * values.shape[1] + 2, 1.5 + 0.02 * len(sources) + 1.5), layout="constrained"
    )
    source_map(figure, axis, values, f"share of the score variance, {side} side")
    starts = [i for i, head in enumerate(reading.heads) if i == 0 or head["layer"] != reading.heads[i - 1]["layer"]]
    every = max(1, len(starts) // 10)
    axis.set_xticks(starts[::every], [reading.heads[i]["layer"] for i in starts[::every]])
    step = max(1, len(sources) // 25)
    axis.set_yticks(range(0, len(sources), step), sources[::step])
    axis.set(xlabel="heads, by layer", ylabel="source")
    figure.suptitle(str(reading.model["name"]), weight="bold")
    return figure


def wiring_grid(reading: Wiring, side: str) -> tuple[list[str], np.ndarray]:
    """All sources, and their shares in every head, (sources, heads); 0 where a share is not above its null."""
    sources = list(dict.fromkeys(source for layer in reading.layers for source in layer["sources"]))
    place = {source: index for index, source in enumerate(sources)}
    values = np.zeros((len(sources), len(reading.heads)))
    of_layer = {layer["layer"]: [place[source] for source in layer["sources"]] for layer in reading.layers}
    for column, head in enumerate(reading.heads):
        share, low, null = (np.asarray(head[side][name]) for name in ("share", "low", "null"))
        values[of_layer[head["layer"]], column] = np.where(low > null, share, 0.0)
    return sources, values


FIGURES = {"map": wiring_map}


def page(reading: Wiring) -> str:
    """A map of sources by heads on either side; a cell shows its interval, its null and examples."""
    sources = list(dict.fromkeys(source for layer in reading.layers for source in layer["sources"]))
    place = {source: index for index, source in enumerate(sources)}
    rows = {layer["layer"]: [place[source] for source in layer["sources"]] for layer in reading.layers}
    frame = {
        "rows": sources,
        "columns": [head["name"] for head in reading.heads],
        "nouns": ["source", "head"],
        "join": "/",
        "measures": [_measure(reading, side, rows, len(sources)) for side in ("key", "query")],
    }
    side, source, head = _clearest(reading)
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [headline(reading)]},
        {"type": "map", "title": "Sources by heads", "plane": True, "pickers": True, "quick": ["key", "query"]},
        {"type": "strip", "by": ["map", "at"], "views": _examples(reading)},
        {"type": "sources", "place": "half", "measure": "query", "title": "Queries from"},
        {"type": "sources", "place": "half", "measure": "key", "title": "Keys from"},
    ]
    tab = {"frame": frame, "state": {"at": f"{source}/{head}", "map": side}, "blocks": blocks}
    facts = f"{len(reading.heads)} heads · {reading.sequences} sequences · {reading.tokens} tokens"
    note = "Examples are kept for the three largest sources of each head and side above their null"
    return document(
        str(reading.model["name"]), "wiring", [tab], facts, versioned([*reading.notes, note], reading.provenance)
    )


def _measure(reading: Wiring, side: str, rows: dict[int, list[int]], count: int) -> dict[str, Any]:
    """Shares on one side with intervals and null levels, of sources by heads; NaN where a source comes later."""
    packed = {}
    for name in ("share", "low", "high", "null"):
        values = np.full((count, len(reading.heads)), np.nan)
        for index, head in enumerate(reading.heads):
            values[rows[head["layer"]], index] = head[side][name]
        packed["values" if name == "share" else name] = pack(values)
    unit = "coloured: share of the score variance above the shuffled null"
    return {"key": side, "label": f"{side} side", "unit": unit, "form": "percent", "above": True, **packed}


def _clearest(reading: Wiring) -> tuple[str, str, str]:
    """The side, source and head with the largest clear share from one head, else the largest share."""
    cells = [
        (_is_head(row["source"]) and row["clear"], row["share"], side, row["source"], head["name"])
        for head in reading.heads
        for side in SIDES
        for row in reading.of(head["name"], side)[:3]
    ]
    return max(cells)[2:]


def _examples(reading: Wiring) -> dict[str, Any]:
    """Pairs of tokens where a source adds most, by side and cell."""
    shown = {}
    for example in reading.examples:
        texts = [_window(reading.texts[pair["sequence"]], pair) for pair in short(list(example["pairs"]), DIGITS)]
        title = f"Where {example['source']} adds most, relative to the mean visible key"
        block = {"title": title, "note": "orange: query; blue: key", "texts": texts}
        shown[f"{example['side']}/{example['source']}/{example['head']}"] = block
    return shown


def _window(text: Any, pair: Any) -> dict[str, Any]:
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
