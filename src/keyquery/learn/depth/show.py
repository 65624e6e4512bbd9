"""The depth-width law in the terminal and as a figure."""

from __future__ import annotations

import math
from typing import Any

from keyquery.learn.depth.depth import Depth
from keyquery.learn.depth.law import FITTED, SIGMAS, Law, count
from keyquery.pages.colours import LIGHT
from keyquery.pages.tables import Text, columns_table

# Layers and width, as published, and the side of the marker for the name.
KNOWN: dict[str, tuple[int, int, str]] = {
    "GPT-2,\nBERT base": (12, 768, "above"),
    "GPT-2 medium,\nBERT large": (24, 1024, "above"),
    "GPT-2 large": (36, 1280, "below"),
    "GPT-2 XL": (48, 1600, "below"),
    "Llama 2 7B": (32, 4096, "left"),
    "Llama 2 13B": (40, 5120, "left"),
    "Llama 2 70B": (80, 8192, "below"),
    "BLOOM 176B": (70, 14336, "left"),
    "GPT-3 175B": (96, 12288, "below"),
}
ASIDE = {"above": (0, 4, "center", "bottom"), "below": (4, -4, "left", "top"), "left": (-5, 0, "right", "center")}
BUDGETS = (1e7, 1e8, 1e9, 1e10, 1e11, 1e12)
LAW, GREY, INK = LIGHT["symmetric"], "#8c959f", "#24292f"
HERE = LIGHT["skew"]


def plane(reading: Depth, pyplot: Any) -> Any:
    """Depth against width: above the line more depth pays off, below it more width."""
    law = Law(**reading.provenance["law"])
    here = (reading.shape["layers"], reading.shape["width"]) if reading.shape else None
    shapes = (*reading.exact, *(here or ()))
    deepest = max(105.0, 1.15 * max(shapes[0::2]))
    low, high = min(100.0, 0.7 * min(shapes[1::2])), max(4e4, 1.5 * max(shapes[1::2]))
    figure, axis = pyplot.subplots(figsize=(5.6, 4.0), layout="constrained")
    axis.set(xlim=(0, deepest), ylim=(low, high), yscale="log", xlabel="layers", ylabel="width")
    _budgets(axis, deepest, low, high)
    _law(axis, law, deepest)
    _known(axis, here)
    _at_hand(axis, reading, here)
    ticks = [width for width in (128, 512, 2048, 8192, 32768, 131072) if low <= width <= high]
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _budgets(axis: Any, deepest: float, low: float, high: float) -> None:
    """Curves of equal parameter count."""
    depths = [deepest * (i + 1) / 200 for i in range(200)]
    for params in BUDGETS:
        widths = [math.sqrt(params / count(layers, 1)) for layers in depths]
        axis.plot(depths, widths, color=GREY, linewidth=0.5, linestyle=(0, (1, 2)), zorder=0)
        if low * 1.1 < widths[-1] < high:
            label = short(params).replace(" million", "M").replace(" billion", "B").replace(" trillion", "T")
            axis.annotate(label, (deepest, widths[-1]), (2, 0), textcoords="offset points", color=GREY, va="center")
    axis.text(1.0, 1.0, "parameters", color=GREY, ha="right", va="bottom", transform=axis.transAxes)


def _law(axis: Any, law: Law, deepest: float) -> None:
    depths = [deepest * i / 200 for i in range(201)]
    if law.has_errors:
        edges = ([law.width(layers, sigmas) for layers in depths] for sigmas in (-SIGMAS, SIGMAS))
        axis.fill_between(depths, *edges, color=LAW, alpha=0.15, linewidth=0, label="95 % band")
    axis.plot(depths, [law.width(layers) for layers in depths], color=LAW, linewidth=0.9, linestyle="--")
    fitted = [FITTED[0] + (FITTED[1] - FITTED[0]) * i / 100 for i in range(101)]
    fitted = [layers for layers in fitted if law.rank is None or law.width(layers) < law.rank]
    axis.plot(fitted, [law.width(layers) for layers in fitted], color=LAW, linewidth=1.8, label="law, fitted range")
    words = {"color": LAW, "style": "italic", "transform": axis.transAxes}
    axis.text(0.03, 0.97, "depth-efficient:\nmore depth pays off", ha="left", va="top", **words)
    axis.text(0.97, 0.03, "depth-inefficient:\nmore width pays off", ha="right", va="bottom", **words)


def _known(axis: Any, here: tuple[float, float] | None) -> None:
    for name, (layers, width, side) in KNOWN.items():
        axis.plot(layers, width, "o", color=INK, markersize=3, zorder=3)
        if here is None or (layers, width) != here:
            x, y, across, up = ASIDE[side]
            axis.annotate(name, (layers, width), (x, y), textcoords="offset points", ha=across, va=up, size=7)


def _at_hand(axis: Any, reading: Depth, here: tuple[float, float] | None) -> None:
    """The given shape, and the path of equal parameter count to the law's shape."""
    layers, width = reading.exact
    own = f"shape by the law: {reading.layers} × {reading.width:,}"
    axis.plot(layers, width, "D", color=HERE, markersize=5, zorder=5, label=own, linestyle="none")
    if here is not None and reading.shape is not None:
        same = (known for known, (*shape, _) in KNOWN.items() if tuple(shape) == here)
        name = reading.shape.get("name") or next(same, "given").replace("\n", " ")
        label = f"{name}: {here[0]} × {here[1]:,}, {reading.verdict}"
        axis.plot(*here, "*", color=HERE, markersize=10, zorder=6, label=label, linestyle="none")
        way = [here[0] + (layers - here[0]) * i / 60 for i in range(61)]
        along = [math.sqrt(reading.params / count(at, 1)) for at in way]
        axis.plot(way, along, color=HERE, linewidth=1.2, zorder=4)
    axis.figure.legend(loc="outside lower center", ncols=2, frameon=False)


def short(number: float) -> str:
    """A parameter count in words."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


ADVICE = {
    "depth-efficient": "more depth would pay off",
    "balanced": "",
    "depth-inefficient": "more width would pay off",
}


def lines(reading: Depth) -> list[Any]:
    """The assessment, the shapes side by side, and caveats."""
    law = reading.provenance["law"]
    equation = f"ln d = {law['a']:g} + {law['b']:g}·L"
    shape = reading.shape
    if shape is None:
        title = f"{short(reading.params)} parameters: {reading.layers} layers of width {reading.width:,} by {equation}"
    else:
        name = shape.get("name") or f"{shape['layers']} layers of width {shape['width']:,}"
        advice = ADVICE[str(reading.verdict)]
        title = f"{name}: {reading.verdict}" + (f": {advice}" if advice else "")
    return [Text(title, style="bold"), _shapes(reading), "", *_words(reading, equation)]


def _shapes(reading: Depth) -> Any:
    table = columns_table("shape", "layers", "width", "heads", "parameters")
    shape = reading.shape
    usable = reading.usable
    table.columns[0].no_wrap = True
    if shape is not None:
        heads = str(shape["heads"]) if "heads" in shape else ""
        table.add_row("given", str(shape["layers"]), f"{shape['width']:,}", heads, short(reading.params))
    exact = reading.exact
    table.add_row("by the law", f"{exact[0]:.1f}", f"{exact[1]:,.1f}", "", short(count(*exact)))
    if reading.interval is not None:
        (low, high), (narrow, wide) = reading.interval["layers"], reading.interval["width"]
        table.add_row("  95 % interval", f"{low:.1f} to {high:.1f}", f"{narrow:,.0f} to {wide:,.0f}", "", "")
    table.add_row("  whole layers", str(reading.layers), f"{reading.width:,}", "", "")
    heads = f"{usable['heads']} × {usable['head_dim']}"
    table.add_row("  whole heads", str(usable["layers"]), f"{usable['width']:,}", heads, short(usable["params"]))
    return table


def _words(reading: Depth, equation: str) -> list[str]:
    lines = []
    if reading.reason is not None:
        lines.append(f"{reading.reason}, {equation}.")
        lines += _saved(reading)
    rank = f"log₃ of the separation rank of two tokens is at most {reading.separation['two_tokens']:,.0f}"
    lines.append(f"Theory: the threshold log₃ d is {reading.threshold:.1f} layers; {rank}.")
    lines += [f"Note: {note}." for note in reading.notes]
    lines.append("Parameters: 12·L·d², non-embedding. Balanced: within a tenth of the law's depth, or its interval.")
    return [*lines, f"Contrary evidence: {'; '.join(reading.contrary)}."]


def _saved(reading: Depth) -> list[str]:
    if reading.saves is None:
        return ["The saving of a better shape is unknown: the law does not cover such a narrow shape."]
    if not reading.saves or reading.contained is None:
        return []
    layers, width = reading.contained
    within = f"the law's shape within it ({layers:.0f} × {width:,.0f})"
    share = reading.saves / reading.params
    most = f"{short(reading.saves)} of its parameters ({share:.0%})"
    return [f"A better shape of equal expressivity saves between none and {most}, down to {within}."]


FIGURES = {"plane": plane}
