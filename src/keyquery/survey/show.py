"""A survey in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any
from urllib.parse import quote

from keyquery.pages.colours import depth_colour
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
CURVE = {"type": "curve", "place": "half", "dots": True, "least": 0, "most": 0}


def page(reading: Survey) -> str:
    """The page of a survey; it links to the page of each model in the folder `models`."""
    said = conclusions(reading)
    meanings = {name: {"note": f"{called}: {reading.units.get(name, '')}"} for name, called in CALLED.items()}
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": said[:1]},
        {"type": "list", "title": "Trends", "items": said[1:]},
        {"type": "summary", "by": ["metric"], "views": meanings},
        *_charts(reading),
        _model_table(reading),
        {"type": "list", "title": "Could not be read", "items": _broken(reading)},
    ]
    blocks = [block for block in blocks if block.get("items", True)]
    notes = versioned(["All heads: heads.parquet. All models: models/*.json"], reading.provenance)
    title = f"Survey of {counted(len(reading.models), 'model')}"
    tabs = [{"blocks": blocks, "state": {"metric": "symmetry", "run": "", "log": ""}}]
    switches = {"metric": {metric: button for metric, (button, _, _) in SHOWN.items()}}
    return document(title, "survey", tabs, _facts(reading), notes, switches=switches)


def _broken(reading: Survey) -> list[str]:
    return [f"{row['name']}: {row['why']}" for row in reading.broken]


def _facts(reading: Survey) -> str:
    heads = sum(row["heads"] for row in reading.models)
    families = len({row["family"] for row in reading.models})
    facts = [counted(heads, "head"), counted(families, "architecture")]
    facts += [counted(len(reading.runs), "training run")] if reading.runs else []
    facts += [f"{counted(len(reading.broken), 'model')} could not be read"] if reading.broken else []
    return " · ".join([*facts, "weights only"])


def _tones(reading: Survey) -> dict[Any, str]:
    """A colour per architecture."""
    families = sorted({row["family"] for row in reading.models}, key=str)
    return {family: f"var(--class{index % 10})" for index, family in enumerate(families)}


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """The values of models as points that link to their pages."""
    return {
        "values": short([row[metric] for row in rows], DIGITS),
        "items": [row["name"] for row in rows],
        "hrefs": [_href(row) for row in rows],
    }


def _href(row: Mapping[str, Any]) -> str:
    return f"models/{quote(str(row['file']), safe='')}.html"


def _charts(reading: Survey) -> list[dict[str, Any]]:
    """By training step, size and architecture; a run counts once in the latter two, by its last checkpoint."""
    last, tones = final(reading.models), _tones(reading)
    charts = [_training(reading)] if reading.runs else []
    if len({row["parameters"] for row in last}) > 1:
        members = {family: [row for row in last if row["family"] == family] for family in tones}
        views = {}
        for metric, called in CALLED.items():
            series = [
                _line(str(family), tones[family], rows, "parameters", metric)
                for family, rows in members.items()
                if rows
            ]
            views[metric] = {"note": f"{called} by number of parameters", "series": series, "form": _form(metric)}
        keys = [{"name": str(family), "tone": tone} for family, tone in tones.items()]
        facts = {"by": ["metric"], "joined": False, "sizes": True, "unit": "parameters"}
        charts.append({**CURVE, "title": "By size", **facts, "views": views, "keys": keys})
    return [*charts, _groups(last, tones)]


def _line(name: str, tone: str, rows: Sequence[Mapping[str, Any]], over: str, metric: str) -> dict[str, Any]:
    return {"name": name, "tone": tone, "x": [row[over] for row in rows], **_points(rows, metric)}


def _groups(last: Sequence[Mapping[str, Any]], tones: Mapping[Any, str]) -> dict[str, Any]:
    """The values of every architecture and attention on one axis, the highest median first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in last:
        groups.setdefault(f"{row['family']}, {row['attention']}", []).append(row)
    views = {}
    for metric in SHOWN:
        order = sorted(groups, key=lambda name: -median(row[metric] for row in groups[name]))
        named = [
            {"name": name, "tone": tones[groups[name][0]["family"]], **_points(groups[name], metric)} for name in order
        ]
        note = f"{CALLED[metric]}; the line is the median"
        views[metric] = {"note": note, "rows": named, "form": _form(metric)}
    return {"type": "groups", "place": "half", "title": "By architecture", "by": ["metric"], "views": views}


def _form(metric: str) -> str:
    return "percent" if metric == "rank_used" else "signed3"


def _training(reading: Survey) -> dict[str, Any]:
    """Curves of all runs, and of the layers of one that is chosen."""
    courses: dict[str, list[Mapping[str, Any]]] = {run["run"]: [] for run in reading.runs}
    for row in sorted(reading.models, key=lambda row: row["step"] or 0):
        if row["run"] in courses:
            courses[row["run"]].append(row)
    tones = {run: f"var(--class{index % 10})" for index, run in enumerate(courses)}
    views: dict[str, Any] = {}
    for metric, (_, called, by_layer) in SHOWN.items():
        lines = [_line(run, tones[run], rows, "step", metric) for run, rows in courses.items()]
        facts = {"form": _form(metric)}
        views[f"{metric}/"] = {"note": f"{called}; click a run for its layers", "series": lines, **facts}
        for line, (run, rows) in zip(lines, courses.items(), strict=True):
            note = f"{called} of {run}; its layers from light (first) to dark (last)"
            series = [*_layers(rows, by_layer), {**line, "tone": "var(--ink)"}]
            views[f"{metric}/{run}"] = {"note": note, "series": series, **facts}
    keys = [{"name": run, "tone": tone, "run": run} for run, tone in tones.items()]
    block = {**CURVE, "title": "By training step", "by": ["metric", "run"], "uses": ["log"], "unit": "step"}
    return {**block, "views": views, "keys": keys, "steps": True}


def _layers(rows: Sequence[Mapping[str, Any]], name: str | None) -> list[dict[str, Any]]:
    """The curve of every layer of a run, thin, light to dark."""
    if name is None:
        return []
    count = min(len(row[name]) for row in rows)
    steps = [row["step"] for row in rows]
    return [
        {
            "name": f"layer {layer}",
            "title": f"layer {layer}: {rows[-1][name][layer]:+.2f} at the end",
            "tone": depth_colour(layer / max(count - 1, 1)),
            "thin": True,
            "x": steps,
            "values": short([row[name][layer] for row in rows], DIGITS),
        }
        for layer in range(count)
    ]


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
