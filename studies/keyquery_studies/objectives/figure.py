"""Figure of the study `objectives`: score parts of the heads, layer by layer, over training."""

from __future__ import annotations

from statistics import mean
from typing import Any

from keyquery.pages.colours import LIGHT
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.objectives.study import NAMES, Objectives


def curves(reading: Objectives, pyplot: Any) -> Any:
    """One row per objective, one panel per layer: mean shares over heads by training step, one line per seed."""
    layers = sorted({row["layer"] for row in reading.heads})
    figure, axes = pyplot.subplots(
        len(OBJECTIVES), len(layers), figsize=(1.75 * len(layers), 3.4), sharex=True, sharey=True, layout="constrained"
    )
    last = max(row["step"] for row in reading.heads)
    for line, objective in zip(axes, OBJECTIVES, strict=True):
        for axis, layer in zip(line, layers, strict=True):
            for seed in sorted({row["seed"] for row in reading.heads}):
                _lines(axis, reading, objective, layer, seed)
            axis.set(xscale="symlog", ylim=(0, 1), yticks=(0, 0.5, 1), xlim=(0, last))
            axis.set_xticks([0, 100, last], ["0", "100", f"{last:,}"])
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(f"{NAMES[objective]} ({objective})\nshare of score variance")
    for axis, layer in zip(axes[0], layers, strict=True):
        axis.set_title(f"layer {layer}")
    parts = _parts(reading)
    handles = [pyplot.Line2D([], [], color=LIGHT[part], label=part.replace("_", "-")) for part in parts]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(parts), frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("training step")
    return figure


def _parts(reading: Objectives) -> list[str]:
    """The parts of scores; the interaction between them is small, and left to JSON."""
    return [share for share in reading.shares() if share in LIGHT]


def _lines(axis: Any, reading: Objectives, objective: str, layer: int, seed: int) -> None:
    rows = [r for r in reading.heads if (r["objective"], r["layer"], r["seed"]) == (objective, layer, seed)]
    steps = sorted({row["step"] for row in rows})
    for part in _parts(reading):
        values = [mean(row[part] for row in rows if row["step"] == step) for step in steps]
        axis.plot(steps, values, color=LIGHT[part], linewidth=1.1, alpha=0.85)
