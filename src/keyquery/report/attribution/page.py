"""Attributions and wirings as self-contained HTML pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.attribution.attribution import Attribution
from keyquery.instruments.attribution.wiring import SIDES, Wiring
from keyquery.pages.document import document
from keyquery.pages.packing import pack
from keyquery.reading import short
from keyquery.report.attribution.figure import SHOWN
from keyquery.report.attribution.wording import DEPTH_2, ablation_sentence, sentence

DIGITS = 4


def attribution_page(reading: Attribution) -> str:
    """The tokens, the table of the largest sources, and the paths."""
    views = {view: _largest(reading, view) for view in reading.table}
    data = {
        "name": reading.model["name"],
        "head": reading.head,
        "sentence": ". ".join(filter(None, (sentence(reading), ablation_sentence(reading)))),
        "tokens": list(reading.tokens),
        "query": reading.query,
        "key": reading.key,
        "units": dict(Attribution.units),
        "views": short(views, DIGITS),
        "paths": short(list(reading.paths), DIGITS),
        "depth_2": DEPTH_2,
        "pairs": short(list(reading.pairs), DIGITS),
        "notes": list(reading.notes),
    }
    title = f"{reading.model['name']}: head {reading.head}"
    return document("attribution", title, ("elements.js", "attribution.js"), data, "attribution")


def _largest(reading: Attribution, view: str) -> dict[str, Any]:
    """The largest sources of both sides with all others summed, so that the table still adds up."""
    table = np.asarray(reading.table[view])
    chosen = []
    for side in SIDES:
        order = list(reading.by_source(side, view))[:SHOWN]
        chosen.append([reading.sources.index(source) for source in order])
    rows, columns = chosen
    names = [[reading.sources[index] for index in each] for each in chosen]
    if len(reading.sources) > SHOWN:
        left = [[index for index in range(len(table)) if index not in each] for each in chosen]
        table = np.vstack((table[rows], table[left[0]].sum(0)))
        table = np.hstack((table[:, columns], table[:, left[1]].sum(1, keepdims=True)))
        names = [[*each, f"{len(table_left)} others"] for each, table_left in zip(names, left, strict=True)]
    else:
        table = table[np.ix_(rows, columns)]
    null = {}
    if reading.null and view in ("relative", "share"):
        null = {side: [reading.null[side][i] for i in each] for side, each in zip(SIDES, chosen, strict=True)}
    return {"query": names[0], "key": names[1], "values": table.tolist(), "null": null}


def wiring_page(reading: Wiring) -> str:
    """A map of sources by heads on either side; a click on a cell shows its interval, its null and examples."""
    sources = list(dict.fromkeys(source for layer in reading.layers for source in layer["sources"]))
    place = {source: index for index, source in enumerate(sources)}
    heads = [
        {
            "name": head["name"],
            "layer": head["layer"],
            **{side: {key: pack(head[side][key]) for key in ("share", "low", "high", "null")} for side in SIDES},
        }
        for head in reading.heads
    ]
    data = {
        "name": reading.model["name"],
        "facts": f"{len(heads)} heads · {reading.sequences} sequences · {reading.tokens} tokens",
        "units": dict(Wiring.units),
        "sources": sources,
        "layers": {layer["layer"]: [place[source] for source in layer["sources"]] for layer in reading.layers},
        "heads": heads,
        "texts": [list(text) for text in reading.texts],
        "examples": short(list(reading.examples), DIGITS),
        "notes": list(reading.notes),
    }
    return document("wiring", str(reading.model["name"]), ("elements.js", "wiring.js"), data, "wiring")
