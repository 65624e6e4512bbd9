"""A survey as a self-contained HTML page: trends over training, size and architecture, and all models."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from keyquery.pages.colours import depth_colour, tones
from keyquery.pages.document import document
from keyquery.reading import short
from keyquery.report.survey.terminal import conclusions
from keyquery.support.printable import counted
from keyquery.survey.reading import FIGURES, Survey, final

SCRIPTS = ("elements.js", "survey.js", "survey_table.js")
DIGITS = 4
FACTS = ("name", "file", "family", "attention", "run", "step", "parameters", "layers", "heads", "width")
SPREAD = ("symmetry_low", "symmetry_high")
LISTS = ("by_layer", "together_by_layer", "labels", "notes")


def survey_page(reading: Survey) -> str:
    """The page of a survey; it links to the page of each model in the folder `models`."""
    for row in reading.models:
        if missing := [name for name in (*FACTS, *FIGURES, *SPREAD, *LISTS) if name not in row]:
            raise ValueError(f"the model {row.get('name')!r} of the survey has no {missing[0]!r}, which the page needs")
    title = f"Survey of {counted(len(reading.models), 'model')}"
    return document("survey", title, SCRIPTS, _data(reading), own_style=tones(), facts=escape(_facts(reading)))


def _facts(reading: Survey) -> str:
    heads = sum(row["heads"] for row in reading.models)
    families = len({row["family"] for row in reading.models})
    facts = [counted(heads, "head"), counted(families, "architecture")]
    facts += [counted(len(reading.runs), "training run")] if reading.runs else []
    facts += [f"{counted(len(reading.broken), 'model')} could not be read"] if reading.broken else []
    return " · ".join([*facts, "weights only"])


def _data(reading: Survey) -> dict[str, Any]:
    last = {row["name"] for row in final(reading.models)}
    return {
        "units": dict(reading.units),
        "models": [{**_model(row), "last": row["name"] in last} for row in reading.models],
        "runs": [row["run"] for row in reading.runs],
        "conclusions": conclusions(reading),
        "broken": [[row["name"], row["why"]] for row in reading.broken],
        "depths": [depth_colour(i / 15) for i in range(16)],
        "versions": reading.provenance.get("versions", {}).get("keyquery", ""),
    }


def _model(row: Mapping[str, Any]) -> dict[str, Any]:
    metrics = short({name: row[name] for name in (*FIGURES, *SPREAD)}, DIGITS)
    labels = ", ".join(f"{count} {name}" for name, count in row["labels"].items())
    layers = {name: short(row[name], DIGITS) for name in ("by_layer", "together_by_layer")}
    return {**{name: row[name] for name in FACTS}, **metrics, **layers, "labels": labels, "notes": row["notes"]}
