"""A path compared with optimal transport in the terminal, as a figure and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyquery.learn.transport.transport import METRICS, Transport
from keyquery.pages.colours import CLASSES, LIGHT
from keyquery.pages.components import DIGITS, column, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.reading import short

LISTED = 30  # classes that are listed
COLUMNS = {"wasserstein": "optimal", "monge_gap": "gap", "path_length": "path", "bures": "Gaussian"}  # others: as named


def recorded(reading: Transport) -> str:
    """The number of points and of recorded steps."""
    records = reading.provenance.get("records", len(reading.steps))
    until = f", up to {reading.unit} {reading.steps[-1]:,}" if reading.steps else ""
    return f"{reading.points:,} points, recorded {records:,} times{until}"


def notes(reading: Transport) -> list[str]:
    """Explanations of the metrics."""
    if reading.published:
        return [
            "Released definition, for comparison: sums over points and classes; a straight path scores far below 1."
        ]
    return [
        "distance: root mean square from start to end; optimal: the minimum over matchings within classes;",
        "random: a random matching; if it is close to optimal, an optimality near 1 is not informative;",
        "efficiency: straightness of the path; matched: share of points that are matched to themselves.",
    ]


def lines(reading: Transport) -> list[Any]:
    """One row for all points and one per class, and an explanation of the columns."""
    rows = reading.records()
    table = columns_table("class", *(COLUMNS.get(name, name) for name in METRICS))
    for row in rows[: LISTED + 1]:
        table.add_row(Text(str(row["class"])), *(_cell(name, row) for name in METRICS))
    where = ", ".join(filter(None, [reading.model["name"], reading.model.get("module")]))
    more = [f"The first {LISTED} of {len(rows) - 1} classes; the JSON has all."] if len(rows) > LISTED + 1 else []
    return [Text(f"{where}: {recorded(reading)}", style="bold"), table, *more, "", *map(Text, notes(reading))]


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if value is None:
        return "–"
    return f"{value:,}" if name == "points" else f"{value:.0%}" if name == "matched" else f"{value:.3g}"


INK = "#24292f"
WAYS = 60  # points whose whole trajectory is drawn


def ways(reading: Transport, pyplot: Any, title: str | None = None) -> Any:
    """Left, trajectories from start (hollow) to end (filled) in 2D; then distances and ratios."""
    if reading.sketch is None:
        raise ValueError("a path without frames has no figure: set frames to 2 or more")
    shape = {"figsize": (6.4, 2.4), "width_ratios": (1.25, 1, 1)}
    figure, axes = pyplot.subplots(1, 3, layout="constrained", **shape)
    _cloud(axes[0], reading)
    _lines(axes[1], reading, {"distance": INK, "wasserstein": LIGHT["symmetric"]}, "distance")
    _lines(axes[2], reading, {"optimality": LIGHT["symmetric"], "efficiency": LIGHT["skew"]}, "ratios")
    axes[2].set_ylim(0, 1.05)
    for axis in axes[1:]:
        axis.set_xlabel(reading.unit)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title or reading.model["name"], fontsize=9)
    return figure


def _cloud(axis: Any, reading: Transport) -> None:
    assert reading.sketch is not None
    frames = np.array(reading.sketch["frames"]).reshape(len(reading.steps), -1, 2)
    class_index = np.array(reading.sketch["classes"])
    for number, row in enumerate(reading.classes):
        points, colour = frames[:, class_index == number], CLASSES[number % len(CLASSES)]
        for way in points[:, : max(WAYS // len(reading.classes), 1)].transpose(1, 0, 2):
            axis.plot(*way.T, color=colour, linewidth=0.4, alpha=0.35)
        axis.scatter(*points[0].T, s=5, facecolors="none", edgecolors=colour, linewidths=0.4, alpha=0.6)
        axis.scatter(*points[-1].T, s=6, color=colour, linewidths=0, alpha=0.8, label=str(row["class"]), zorder=3)
    shown = sum(reading.sketch["shares"])
    axis.set(title=f"hollow: start, filled: end\n({shown:.0%} of the variance)", xticks=[], yticks=[], aspect="equal")
    axis.title.set_fontsize(7.5)
    axis.set_adjustable("datalim")
    axis.spines[:].set_color("#d8dee4")
    if 1 < len(reading.classes) <= len(CLASSES):
        axis.legend(frameon=False, fontsize=6, markerscale=1.5, handletextpad=0.1, borderpad=0)


def _lines(axis: Any, reading: Transport, colours: dict[str, str], title: str) -> None:
    for name, colour in colours.items():
        values = [np.nan if value is None else value for value in reading.curves[name]]
        axis.plot(reading.steps, values, color=colour, linewidth=1.2, label=name)
    axis.set(title=title, ylim=(0, None))
    axis.legend(frameon=False, fontsize=6.5)


FIGURES = {"ways": ways}
SAID = {"distance": "distance T", "wasserstein": "optimal W₂", "optimality": "optimality", "efficiency": "efficiency"}


def page(reading: Transport) -> str:
    """The point cloud in motion, compared with optimal transport, and the metrics over steps."""
    if reading.sketch is None:
        raise ValueError("a path without frames has no page: set frames to 2 or more")
    rows = reading.records()
    total = rows[0]
    distance, optimal, ratio = (_cell(name, total) for name in ("distance", "wasserstein", "optimality"))
    sentence = (
        f"The points move {distance} on average (root mean square); an optimal matching needs {optimal}: "
        f"optimality {ratio}."
    )
    tags = [
        {"value": short(total[name], 3), "name": label, "title": reading.units.get(name)}
        for name, label in (("random", "random matching"), ("efficiency", "efficiency"))
    ]
    far = {"distance": "var(--ink)", "wasserstein": "var(--symmetric)"}
    ratios = {"optimality": "var(--symmetric)", "efficiency": "var(--skew)"}
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [sentence], "tags": tags},
        {"type": "cloud", "place": "seven", **_cloud_data(reading)},
        _curves(reading, "Distance", far),
        _curves(reading, "Optimality and efficiency", ratios, 1),
        _class_table(reading, rows),
    ]
    facts = " · ".join(filter(None, [reading.model.get("module"), recorded(reading)]))
    texts = [*notes(reading), *versioned([], reading.provenance)]
    state = {"over": "coupling", "hidden": ""}
    return document(str(reading.model["name"]), "transport", [{"blocks": blocks, "state": state}], facts, texts)


def _cloud_data(reading: Transport) -> dict[str, Any]:
    sketch = dict(reading.sketch or {})
    shown, whole = len(sketch["classes"]), reading.records()[0]["points"]
    seen = f"Projection on two directions with {sum(sketch['shares'][:2]):.0%} of the variance"
    classes = [{"name": str(row["class"]), "tone": f"var(--class{i % 10})"} for i, row in enumerate(reading.classes)]
    return {
        "sketch": short(sketch, DIGITS),
        "steps": list(reading.steps),
        "unit": reading.unit,
        "classes": classes,
        "curves": {name: short(list(reading.curves[name]), DIGITS) for name in SAID},
        "said": SAID,
        "about": f"{seen}; {shown} of {whole} points.",
    }


def _curves(reading: Transport, title: str, tones: dict[str, str], most: float | None = None) -> dict[str, Any]:
    keys = [{"name": SAID[name], "tone": tone} for name, tone in tones.items()]
    values = [short(list(reading.curves[name]), DIGITS) for name in tones]
    series = [{**key, "values": curve} for key, curve in zip(keys, values, strict=True)]
    block = {"type": "steps", "place": "five", "title": title, "x": list(reading.steps), "unit": reading.unit}
    return {**block, "series": series, "keys": keys, "least": 0, "most": most, "tall": 170}


def _class_table(reading: Transport, rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = [column("class", [str(row["class"]) for row in rows])]
    for name in METRICS:
        label, form = SAID.get(name, name.replace("_", " ")), "percent" if name == "matched" else "figure"
        columns.append(column(label, [row[name] for row in rows], unit=reading.units.get(name), form=form))
    return {"type": "table", "title": "Metrics per class", "columns": columns}
