"""A path as a self-contained HTML page: the point cloud in motion, compared with optimal transport."""

from __future__ import annotations

from html import escape
from typing import Any

from keyquery.instruments.transport.transport import CURVES, FIGURES, Transport
from keyquery.pages.colours import depth_colour, tones
from keyquery.pages.document import document
from keyquery.reading import short
from keyquery.report.transport.wording import heads_notes, notes, recorded

SCRIPTS = ("elements.js", "transport.js")
DIGITS = 5


def transport_page(reading: Transport) -> str:
    """The page of a path."""
    if reading.sketch is None:
        raise ValueError("a path without frames has no page: set frames to 2 or more")
    facts = escape(" · ".join(filter(None, [reading.model.get("module"), recorded(reading)])))
    name = str(reading.model["name"])
    return document("transport", name, SCRIPTS, _data(reading), "transport", own_style=tones(), facts=facts)


def _data(reading: Transport) -> dict[str, Any]:
    deepest = max((head["layer"] for head in reading.heads), default=0) or 1
    heads = [
        {
            "name": f"{head['layer']}.{head['head']}",
            "colour": depth_colour(head["layer"] / deepest),
            "since": head["since"],
            **{name: head[name] for name in ("symmetric_energy", "skew_energy", "symmetry")},
        }
        for head in reading.heads
    ]
    data = {
        "units": dict(reading.units),
        "unit": reading.unit,
        "steps": reading.steps,
        "figures": [{"class": row["class"], **{name: row[name] for name in FIGURES}} for row in reading.records()],
        "classes": [str(row["class"]) for row in reading.classes],
        "curves": {name: reading.curves[name] for name in CURVES},
        "sketch": reading.sketch,
        "heads": heads,
        "notes": [*notes(reading), *heads_notes(reading)],
    }
    return short(data, DIGITS)
