"""The depth-width law in the terminal, for a parameter budget or a shape."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.depth.depth import Depth
from keyquery.instruments.depth.law import count
from keyquery.pages.tables import columns_table
from keyquery.report.depth.figure import short

ADVICE = {
    "depth-efficient": "more depth would pay off",
    "balanced": "",
    "depth-inefficient": "more width would pay off",
}


def depth_lines(reading: Depth) -> list[Any]:
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


def _shapes(reading: Depth) -> Table:
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
    separation = reading.separation
    theory = f"Theory: the threshold log₃ d is {reading.threshold:.1f} layers"
    if separation["low"] is not None:
        theory += (
            f"; log₃ of the separation rank is {separation['low']:,.0f} to {separation['high']:,.0f} "
            "(unverified bounds)"
        )
    lines.append(f"{theory}, for two tokens at most {separation['two_tokens']:,.0f}.")
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
