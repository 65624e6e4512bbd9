"""The depth-width law in the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from keyquery.learn.depth.depth import FITTED, SIGMAS, Depth, Law, count, width_within
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
LAW, HERE, GREY, INK = LIGHT["symmetric"], LIGHT["skew"], "#8c959f", "#24292f"
ADVICE = {
    "depth-efficient": ": more depth would pay off",
    "balanced": "",
    "depth-inefficient": ": more width would pay off",
}


def plane(reading: Depth, pyplot: Any) -> Any:
    """Depth against width: above the line more depth pays off, below it more width."""
    law = Law(**reading.provenance["law"])
    given = (reading.shape["layers"], reading.shape["width"]) if reading.shape else None
    depths, widths = zip(reading.exact, *([given] if given else []), strict=True)
    deepest = max(105.0, 1.15 * max(depths))
    low, high = min(100.0, 0.7 * min(widths)), max(4e4, 1.5 * max(widths))
    figure, axis = pyplot.subplots(figsize=(5.6, 4.0), layout="constrained")
    axis.set(xlim=(0, deepest), ylim=(low, high), yscale="log", xlabel="layers", ylabel="width")
    _budgets(axis, deepest, low, high)
    _law(axis, law, deepest)
    for name, (layers, width, side) in KNOWN.items():
        axis.plot(layers, width, "o", color=INK, markersize=3, zorder=3)
        if (layers, width) != given:
            x, y, across, up = ASIDE[side]
            axis.annotate(name, (layers, width), (x, y), textcoords="offset points", ha=across, va=up, size=7)
    _shapes_at_hand(axis, reading, given)
    ticks = [width for width in (128, 512, 2048, 8192, 32768, 131072) if low <= width <= high]
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _curve(axis: Any, first: float, last: float, width: Callable[[float], float], **look: Any) -> None:
    """Widths at depths from the first to the last."""
    depths = np.linspace(first, last, 201).tolist()
    axis.plot(depths, [width(layers) for layers in depths], **look)


def _budgets(axis: Any, deepest: float, low: float, high: float) -> None:
    """Curves of equal parameter count."""
    for params in BUDGETS:
        width = partial(width_within, params)
        _curve(axis, deepest / 200, deepest, width, color=GREY, linewidth=0.5, linestyle=(0, (1, 2)), zorder=0)
        if low * 1.1 < width(deepest) < high:
            label = short(params).replace(" million", "M").replace(" billion", "B").replace(" trillion", "T")
            axis.annotate(label, (deepest, width(deepest)), (2, 0), textcoords="offset points", color=GREY, va="center")
    axis.text(1.0, 1.0, "parameters", color=GREY, ha="right", va="bottom", transform=axis.transAxes)


def _law(axis: Any, law: Law, deepest: float) -> None:
    if law.has_errors:
        depths = np.linspace(0, deepest, 201).tolist()
        edges = ([law.width(layers, sigmas) for layers in depths] for sigmas in (-SIGMAS, SIGMAS))
        axis.fill_between(depths, *edges, color=LAW, alpha=0.15, linewidth=0, label="95 % band")
    _curve(axis, 0, deepest, law.width, color=LAW, linewidth=0.9, linestyle="--")
    deepest_fitted = FITTED[1] if law.rank is None else min(FITTED[1], law.depth(law.rank))
    if deepest_fitted > FITTED[0]:
        _curve(axis, FITTED[0], deepest_fitted, law.width, color=LAW, linewidth=1.8, label="law, fitted range")
    words = {"color": LAW, "style": "italic", "transform": axis.transAxes}
    axis.text(0.03, 0.97, "depth-efficient:\nmore depth pays off", ha="left", va="top", **words)
    axis.text(0.97, 0.03, "depth-inefficient:\nmore width pays off", ha="right", va="bottom", **words)


def _shapes_at_hand(axis: Any, reading: Depth, given: tuple[float, float] | None) -> None:
    """The law's shape, and the path of equal parameter count to it from the given one."""
    label = f"shape by the law: {reading.layers} × {reading.width:,}"
    axis.plot(*reading.exact, "D", color=HERE, markersize=5, zorder=5, label=label, linestyle="none")
    if given is not None and reading.shape is not None:
        same = (known for known, (*shape, _) in KNOWN.items() if tuple(shape) == given)
        name = reading.shape.get("name") or next(same, "given").replace("\n", " ")
        label = f"{name}: {given[0]} × {given[1]:,}, {reading.verdict}"
        axis.plot(*given, "*", color=HERE, markersize=10, zorder=6, label=label, linestyle="none")
        width = partial(width_within, reading.params)
        _curve(axis, given[0], reading.exact[0], width, color=HERE, linewidth=1.2, zorder=4)
    axis.figure.legend(loc="outside lower center", ncols=2, frameon=False)


def short(number: float) -> str:
    """A parameter count in words."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


def lines(reading: Depth) -> list[Any]:
    """The assessment, the shapes side by side, and caveats."""
    law, shape = reading.provenance["law"], reading.shape
    equation = f"ln d = {law['a']:g} + {law['b']:g}·L"
    if shape is None:
        title = f"{short(reading.params)} parameters: {reading.layers} layers of width {reading.width:,} by {equation}"
    else:
        name = shape.get("name") or f"{shape['layers']} layers of width {shape['width']:,}"
        title = f"{name}: {reading.verdict}{ADVICE[str(reading.verdict)]}"
    return [Text(title, style="bold"), _shapes(reading), "", *_words(reading, equation)]


def _shapes(reading: Depth) -> Any:
    table = columns_table("shape", "layers", "width", "heads", "parameters")
    table.columns[0].no_wrap = True
    shape, exact, usable = reading.shape, reading.exact, reading.usable
    if shape is not None:
        heads = str(shape.get("heads", ""))
        table.add_row("given", str(shape["layers"]), f"{shape['width']:,}", heads, short(reading.params))
    table.add_row("by the law", f"{exact[0]:.1f}", f"{exact[1]:,.1f}", "", short(count(*exact)))
    if reading.interval is not None:
        (low, high), (narrow, wide) = reading.interval["layers"], reading.interval["width"]
        table.add_row("  95 % interval", f"{low:.1f} to {high:.1f}", f"{narrow:,.0f} to {wide:,.0f}", "", "")
    table.add_row("  whole layers", str(reading.layers), f"{reading.width:,}", "", "")
    heads = f"{usable['heads']} × {usable['head_dim']}"
    table.add_row("  whole heads", str(usable["layers"]), f"{usable['width']:,}", heads, short(usable["params"]))
    return table


def _words(reading: Depth, equation: str) -> list[str]:
    words = [] if reading.reason is None else [f"{reading.reason}, {equation}."]
    if reading.saves and reading.contained is not None:
        layers, width = reading.contained
        within = f"the law's shape within it ({layers:.0f} × {width:,.0f})"
        most = f"{short(reading.saves)} of its parameters ({reading.saves / reading.params:.0%})"
        words.append(f"A better shape of equal expressivity saves between none and {most}, down to {within}.")
    elif reading.reason is not None and reading.saves is None:
        words.append("The saving of a better shape is unknown: the law does not cover such a narrow shape.")
    rank = f"log₃ of the separation rank of two tokens is at most {reading.separation['two_tokens']:,.0f}"
    words.append(f"Theory: the threshold log₃ d is {reading.threshold:.1f} layers; {rank}.")
    words += [f"Note: {note}." for note in reading.notes]
    words.append("Parameters: 12·L·d², non-embedding. Balanced: within a tenth of the law's depth, or its interval.")
    return [*words, f"Contrary evidence: {'; '.join(reading.contrary)}."]


FIGURES = {"plane": plane}
