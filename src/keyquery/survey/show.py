"""A survey in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from keyquery.pages.colours import DEPTHS
from keyquery.pages.components import DIGITS, column, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import columns_table
from keyquery.reading import short
from keyquery.support.printable import counted
from keyquery.survey.reading import FIGURES as METRICS
from keyquery.survey.reading import Survey, final

LISTED = 40  # models, runs or families that a terminal shows
SOME = 8  # runs or architectures that are described in words
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def conclusions(reading: Survey) -> list[str]:
    """The conclusions, one sentence each."""
    sentences = []
    for run in reading.runs[:SOME]:
        half = "" if run["half"] is None else f", half of the change by step {run['half']:,}"
        change = (
            f"symmetry goes from {run['start']:+z.3f} at step {run['first']:,} to {run['end']:+z.3f} at {run['last']:,}"
        )
        count = f"{run['steps']} checkpoints{_rises(run['rises'])}"
        sentences.append(f"During training, {run['run']}: {change}{half} ({count}).")
    if len(reading.runs) > SOME:
        grown = sum(run["change"] > 0 for run in reading.runs)
        sentences.append(f"During training, symmetry increases in {grown} of {len(reading.runs)} runs.")
    for row in reading.sizes[:SOME]:
        name = "all architectures" if row["family"] == "all" else row["family"]
        span = f"{counted(row['models'], 'model')}, {size(row['smallest'])} to {size(row['largest'])}"
        sentences.append(
            f"By size, {name}: symmetry changes by {row['slope']:+.3f} per decade ({span}{_rises(row['rises'])})."
        )
    if len(reading.families) > 1:
        first, last = reading.families[0], reading.families[-1]
        most, least = (
            f"{row['family']}, {row['attention']}: {row['symmetry']:+z.3f} ({counted(row['models'], 'model')})"
            for row in (first, last)
        )
        sentences.append(f"By architecture, symmetry is highest in {most}, lowest in {least}.")
    return sentences


def lines(reading: Survey) -> list[Any]:
    """A row per model, the conclusions, and models that could not be read."""
    table = columns_table("model", "architecture", "step", "size", "heads", "symmetry", "of layers", "column dir.")
    for row in sorted(reading.models, key=_order)[:LISTED]:
        table.add_row(
            _cut(row["name"], 36),
            _cut(str(row["family"]), 12),
            "–" if row["step"] is None else f"{row['step']:,}",
            size(row["parameters"]),
            str(row["heads"]),
            *(f"{row[name]:+z.3f}" for name in ("symmetry", "symmetry_together", "column_directionality")),
        )
    more = [f"… and {len(reading.models) - LISTED} more"] if len(reading.models) > LISTED else []
    broken = (f"Could not read {row}" for row in _broken(reading))
    return [table, *more, "", *conclusions(reading), *broken]


def size(count: float) -> str:
    """A parameter count with a unit."""
    for unit, letter in UNITS:
        if count >= 0.9995 * unit:
            return f"{float(f'{count / unit:.3g}'):g}{letter}"
    return f"{count:g}"


def _order(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """Sort key that keeps the checkpoints of a run together."""
    return str(row["run"] or row["name"]), row["step"] or 0, row["name"]


def _rises(value: float | None) -> str:
    return "" if value is None else f"; rank correlation {value:+z.2f}"


def _cut(text: str, most: int) -> str:
    """The end of a long name, which distinguishes models."""
    return text if len(text) <= most else "…" + text[1 - most :]


# Metrics that can be chosen: the name on the button, what they are called, and the field of their values by layer.
SHOWN = {
    "symmetry": ("heads", "symmetry of heads", "by_layer"),
    "symmetry_folded": ("heads, folded", "symmetry of heads, folded", None),
    "symmetry_together": ("whole layers", "symmetry of whole layers", "together_by_layer"),
    "column_directionality": ("column directionality", "column directionality of whole layers", None),
    "rank_used": ("rank used", "effective rank over head width", None),
}
CALLED = {metric: called for metric, (_, called, _) in SHOWN.items()}
TRENDS = {"step": "By training step", "parameters": "By size", "architecture": "By architecture"}
FACTS = ("name", "attention", "run", "step", "parameters", *METRICS, "by_layer", "together_by_layer")


def page(reading: Survey) -> str:
    """The page of a survey; it links to the page of each model in the folder `models`."""
    said = conclusions(reading)
    meanings = {name: {"note": f"{called}: {reading.units.get(name, '')}"} for name, called in CALLED.items()}
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": said[:1]},
        {"type": "list", "title": "Trends", "items": said[1:]},
        {"type": "summary", "by": ["metric"], "views": meanings},
        *({"type": "trend", "place": "half", "over": over, "title": TRENDS[over]} for over in _trends(reading)),
        _model_table(reading),
        {"type": "list", "title": "Could not be read", "items": _broken(reading)},
    ]
    blocks = [block for block in blocks if block.get("items", True)]
    notes = versioned(["All heads: heads.parquet. All models: models/*.json"], reading.provenance)
    title = f"Survey of {counted(len(reading.models), 'model')}"
    state = {"metric": "symmetry", "run": "", "log": ""}
    tab = {"blocks": blocks, "state": state, "models": _models(reading), "depths": DEPTHS}
    tab["metrics"] = {
        name: {"called": shown[1], "form": _form(name), "layers": shown[2]} for name, shown in SHOWN.items()
    }
    tab["runs"] = [run["run"] for run in reading.runs]
    switches = {"metric": {metric: button for metric, (button, _, _) in SHOWN.items()}}
    return document(title, "survey", [tab], _facts(reading), notes, switches=switches)


def _models(reading: Survey) -> list[dict[str, Any]]:
    """What trends are drawn from; `last`: of a run, its last checkpoint."""
    last = set(map(id, final(reading.models)))
    return [
        {
            **{name: short(row[name], DIGITS) for name in FACTS},
            "family": str(row["family"]),
            "href": _href(row),
            "last": id(row) in last,
        }
        for row in reading.models
    ]


def _broken(reading: Survey) -> list[str]:
    return [f"{row['name']}: {row['why']}" for row in reading.broken]


def _facts(reading: Survey) -> str:
    heads = sum(row["heads"] for row in reading.models)
    families = len({row["family"] for row in reading.models})
    facts = [counted(heads, "head"), counted(families, "architecture")]
    facts += [counted(len(reading.runs), "training run")] if reading.runs else []
    facts += [f"{counted(len(reading.broken), 'model')} could not be read"] if reading.broken else []
    return " · ".join([*facts, "weights only"])


def _href(row: Mapping[str, Any]) -> str:
    return f"models/{quote(str(row['file']), safe='')}.html"


def _trends(reading: Survey) -> list[str]:
    sizes = {row["parameters"] for row in final(reading.models)}
    shown = {"step": bool(reading.runs), "parameters": len(sizes) > 1, "architecture": True}
    return [over for over, wanted in shown.items() if wanted]


def _form(metric: str) -> str:
    return "percent" if metric == "rank_used" else "signed3"


def _model_table(reading: Survey) -> dict[str, Any]:
    rows = sorted(reading.models, key=_order)
    words = {"name": "model", "family": "architecture", "attention": "attention", "run": "run"}
    columns = [
        column(label, [row[key] for row in rows]) for key, label in words.items() if any(row[key] for row in rows)
    ]
    if any(row["step"] is not None for row in rows):
        columns.append(column("step", [row["step"] for row in rows], form="grouped"))
    columns.append(column("size", [row["parameters"] for row in rows], form="size"))
    columns += [column(name, [row[name] for row in rows], form="grouped") for name in ("layers", "heads", "width")]
    for metric in METRICS:
        columns.append(
            column(CALLED[metric], [row[metric] for row in rows], form=_form(metric), unit=reading.units.get(metric))
        )
    quartiles = [f"{row['symmetry_low']:+.2f} … {row['symmetry_high']:+.2f}" for row in rows]
    columns.append(column("quartiles of symmetry", quartiles, order=[row["symmetry_low"] for row in rows]))
    labels = [", ".join(f"{count} {name}" for name, count in row["labels"].items()) for row in rows]
    columns.append(column("labels", labels))
    columns[0]["notes"] = ["\n".join([row["name"], *row["notes"]]) for row in rows]
    block = {"type": "table", "title": "Models", "columns": columns, "hrefs": [_href(row) for row in rows]}
    return {**block, "filter": "name, architecture, run …", "size": "tall", "top": 300, "sort": "model"}
