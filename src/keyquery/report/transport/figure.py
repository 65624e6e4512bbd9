"""A path compared with optimal transport, as a figure: trajectories of points, metrics over steps, and heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.transport.transport import Transport
from keyquery.pages.colours import CLASSES, LIGHT, depth_colour

INK, FAINT = "#24292f", "#8c959f"
WAYS = 60  # points whose whole trajectory is drawn


def ways(reading: Transport, pyplot: Any, title: str | None = None) -> Any:
    """Left, trajectories from start (hollow) to end (filled) in 2D; then distances, ratios and, if recorded, heads."""
    if reading.sketch is None:
        raise ValueError("a path without frames has no figure: set frames to 2 or more")
    several = bool(reading.heads)
    shape = {"figsize": (7.6 if several else 6.4, 2.4), "width_ratios": (1.25, *([1] * (2 + several)))}
    figure, axes = pyplot.subplots(1, 3 + several, layout="constrained", **shape)
    _cloud(axes[0], reading)
    _lines(axes[1], reading, {"distance": INK, "wasserstein": LIGHT["symmetric"]}, "distance")
    _lines(axes[2], reading, {"optimality": LIGHT["symmetric"], "efficiency": LIGHT["skew"]}, "ratios")
    axes[2].set_ylim(0, 1.05)
    if several:
        _heads(axes[3], reading)
    for axis in axes[1:]:
        axis.set_xlabel(reading.unit)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title or reading.model["name"], fontsize=9)
    return figure


def _cloud(axis: Any, reading: Transport) -> None:
    assert reading.sketch is not None
    places = np.array(reading.sketch["frames"]).reshape(len(reading.steps), -1, 2)
    number = np.array(reading.sketch["classes"])
    for at, row in enumerate(reading.classes):
        mine, colour = places[:, number == at], CLASSES[at % len(CLASSES)]
        for way in mine[:, : max(WAYS // len(reading.classes), 1)].transpose(1, 0, 2):
            axis.plot(*way.T, color=colour, linewidth=0.4, alpha=0.35)
        axis.scatter(*mine[0].T, s=5, facecolors="none", edgecolors=colour, linewidths=0.4, alpha=0.6)
        axis.scatter(*mine[-1].T, s=6, color=colour, linewidths=0, alpha=0.8, label=str(row["class"]), zorder=3)
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
    axis.set(title=title)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=6.5)


def _heads(axis: Any, reading: Transport) -> None:
    deepest = max(head["layer"] for head in reading.heads) or 1
    axis.axhline(0, color=FAINT, linewidth=0.6)
    for head in reading.heads:
        axis.plot(
            reading.steps, head["symmetry"], color=depth_colour(head["layer"] / deepest), linewidth=0.8, alpha=0.8
        )
    most = max(0.25, 1.1 * max(abs(value) for head in reading.heads for value in head["symmetry"]))
    axis.set(title="symmetry per head", ylim=(-most, most), ylabel="skew        symmetric")
