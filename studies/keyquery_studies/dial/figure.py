"""Figures of the study `dial`: the effect of ablating each part of the scores, and in which layers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from keyquery.pages.colours import LIGHT
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery_studies.dial.study import Abilities

# The two abilities shown for each kind of model, and their titles.
SHOWN = {
    "decoders": {"next token": "plain text", "repeated tokens": "repeated random tokens"},
    "encoders": {"masked words": "masked words", "sentence halves": "sentence halves"},
}
CHANGE = {"decoders": "Δ loss (nats per token)", "encoders": "Δ accuracy"}
GREY = "#59636e"


def parts(reading: Abilities, pyplot: Any, of: str | None = None) -> Any:
    """One row per model, two abilities side by side: the change when each part is ablated in all heads."""
    of, models, shown = _chosen(reading, of)
    figure, axes = _panels(pyplot, models, shown, 0.34 + 0.24 * len(LIGHT))
    summary = [row for row in reading.summary() if row["means"] == "data" and row["part"] != "none"]
    for line, model in zip(axes, models, strict=True):
        rows = [row for row in summary if row["model"] == model["name"]]
        for axis, ability in zip(line, shown, strict=True):
            own = [row for row in rows if row["ability"] == ability]
            # A model that is worse than a uniform guess has nothing to lose.
            helpless = of == "decoders" and bool(own) and own[0]["before"] > math.log(model["vocabulary"] or math.inf)
            _bars(axis, own, pale=helpless)
            if own:
                caption = _whole(model, own[0]["before"], of)
                axis.text(0.5, 1.01, caption, transform=axis.transAxes, ha="center", va="bottom", size=6.5, color=GREY)
        ends = [value for axis in line for value in axis.get_xlim()]
        for axis in line:  # one scale, so that lengths are comparable
            axis.set_xlim(min(ends), max(ends) * 1.16)
        _label(line, model)
    figure.supxlabel(f"{CHANGE[of]} when the part is ablated in all heads; 95 % intervals", color=GREY, size=8)
    return figure


def layers(reading: Abilities, pyplot: Any, of: str | None = None) -> Any:
    """One row per model, two abilities side by side: the effect of each part in each layer, darkest for the largest."""
    of, models, shown = _chosen(reading, of)
    summary = [row for row in reading.summary("layer") if row["means"] == "data"]
    models = [model for model in models if any(row["model"] == model["name"] for row in summary)]
    if not models:
        raise ValueError("this study ablated parts in all heads only: use --by layer for layers")
    figure, axes = _panels(pyplot, models, shown, 0.4 + 0.19 * len(LIGHT))
    for line, model in zip(axes, models, strict=True):
        for axis, ability in zip(line, shown, strict=True):
            rows = [row for row in summary if (row["model"], row["ability"]) == (model["name"], ability)]
            _strips(axis, rows, model["layers"], worse=1 if of == "decoders" else -1)
        _label(line, model)
    caption = f"layer; colour scale per panel, largest {CHANGE[of]} at the right"
    figure.supxlabel(caption, color=GREY, size=8)
    return figure


def _chosen(reading: Abilities, of: str | None) -> tuple[str, list[Mapping[str, Any]], dict[str, str]]:
    """The kind of models shown (default: decoders, if any), the models, and the measured ones of its two abilities."""
    kinds = {kind: [m for m in reading.models if m["causal"] == (kind == "decoders")] for kind in SHOWN}
    of = of or ("decoders" if kinds["decoders"] else "encoders")
    check_choice("of", of, tuple(SHOWN))
    if not kinds[of]:
        raise ValueError(f"this study has no {of}")
    measured = {row["ability"] for row in reading.rows}
    return of, kinds[of], {ability: title for ability, title in SHOWN[of].items() if ability in measured}


def _panels(pyplot: Any, models: list[Mapping[str, Any]], shown: dict[str, str], height: float) -> tuple[Any, Any]:
    size = (3.4 * len(shown), 0.5 + height * len(models))
    figure, axes = pyplot.subplots(len(models), len(shown), figsize=size, layout="constrained", squeeze=False)
    for axis, title in zip(axes[0], shown.values(), strict=True):
        axis.set_title(title, pad=10, weight="bold")
    return figure, axes


def _label(line: Any, model: Mapping[str, Any]) -> None:
    """Label a row with the model's name, and its first panel with the parts' names."""
    line[0].set_ylabel(textwrap.fill(model["name"], 15), weight="bold", labelpad=8)
    for axis in line[1:]:
        axis.tick_params(labelleft=False)


def _bars(axis: Any, rows: list[dict[str, Any]], pale: bool) -> None:
    shown = _named(axis, rows)
    for row in rows:
        y, error = shown.index(row["part"]), [[row["change"] - row["low"]], [row["high"] - row["change"]]]
        axis.barh(y, row["change"], height=0.7, color=LIGHT[row["part"]], alpha=0.25 if pale else 1)
        axis.errorbar(row["change"], y, xerr=error, color="#1f2328", lw=0.8, capsize=2)
        end = max(row["high"], 0.0)
        axis.annotate(_signed(row["change"]), (end, y), (3, 0), textcoords="offset points", va="center", size=7)
    axis.axvline(0, color="#8b949e", lw=0.6)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _named(axis: Any, rows: list[dict[str, Any]]) -> list[str]:
    """One line per measured part, labelled in its colour."""
    shown = [part for part in LIGHT if any(row["part"] == part for row in rows)]
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.set_yticks(range(len(shown)), shown)
    axis.tick_params(axis="y", length=0)
    for label, part in zip(axis.get_yticklabels(), shown, strict=True):
        label.set_color(LIGHT[part])
    return shown


def _strips(axis: Any, rows: list[dict[str, Any]], count: int, worse: int) -> None:
    """One strip per part, in its colour; all on one scale."""
    most = max((worse * row["change"] for row in rows), default=0.0)
    shown = _named(axis, rows)
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap
    for y, part in enumerate(shown):
        change_of = {row["layer"]: row["change"] for row in rows if row["part"] == part}
        strip = [[worse * change_of.get(layer, 0.0) for layer in range(count)]]
        shades = colours.from_list(part, ["#f6f8fa", LIGHT[part]])
        place = (-0.5, count - 0.5, y + 0.42, y - 0.42)
        axis.imshow(strip, cmap=shades, vmin=0, vmax=max(most, 1e-9), extent=place, aspect="auto")
        worst = max(change_of, key=lambda layer: worse * change_of[layer])
        label = f"{_signed(change_of[worst])} in {worst}"
        axis.annotate(label, (1.01, y), xycoords=("axes fraction", "data"), va="center", size=6.5)
    axis.set(xlim=(-0.5, count - 0.5), ylim=(len(shown) - 0.5, -0.5))  # imshow has changed the limits
    axis.locator_params(axis="x", integer=True, nbins=8)
    axis.spines[:].set_visible(False)


def _whole(model: Mapping[str, Any], before: float, of: str) -> str:
    """The metric of the full model, and of a uniform guess: a model that cannot copy has nothing to lose."""
    if of == "encoders":
        return f"full model's accuracy: {before:.2f}"
    if not model["vocabulary"]:
        return f"full model's loss: {before:.2f}"
    guess = math.log(model["vocabulary"])
    able = "worse than chance, loss" if before > guess else "full model's loss"
    return f"{able}: {before:.2f}, uniform guess: {guess:.1f}"


def _signed(value: float) -> str:
    return f"{value:+z.2f}".replace("-", "−")
