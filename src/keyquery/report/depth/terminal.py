"""The law of depth against width in the terminal: what it says of a budget and of a shape."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.depth.depth import Depth
from keyquery.instruments.depth.law import count
from keyquery.report.depth.figure import short
from keyquery.report.kit.tables import columns_table

TOLD = {"depth-efficient": "more depth would pay", "balanced": "", "depth-inefficient": "more width would pay"}


def depth_lines(reading: Depth) -> list[Any]:
    """The verdict, the shapes side by side, and what is to be kept in mind."""
    law = reading.provenance["law"]
    said = f"ln d = {law['a']:g} + {law['b']:g}·L"
    shape = reading.shape
    if shape is None:
        title = f"{short(reading.params)} parameters: {reading.layers} layers of width {reading.width:,} by {said}"
    else:
        name = shape.get("name") or f"{shape['layers']} layers of width {shape['width']:,}"
        told = f": {TOLD[str(reading.verdict)]}" * bool(TOLD[str(reading.verdict)])
        title = f"{name}: {reading.verdict}{told}"
    return [Text(title, style="bold"), _shapes(reading), "", *_words(reading, said)]


def _shapes(reading: Depth) -> Table:
    made, shape, usable = (
        columns_table("shape", "layers", "width", "heads", "parameters"),
        reading.shape,
        reading.usable,
    )
    made.columns[0].no_wrap = True
    if shape is not None:
        heads = str(shape["heads"]) if "heads" in shape else ""
        made.add_row("as it is", str(shape["layers"]), f"{shape['width']:,}", heads, short(reading.params))
    exact = reading.exact
    made.add_row("by the law", f"{exact[0]:.1f}", f"{exact[1]:,.1f}", "", short(count(*exact)))
    (low, high), (narrow, wide) = reading.interval["layers"], reading.interval["width"]
    made.add_row("  95 % interval", f"{low:.1f} to {high:.1f}", f"{narrow:,.0f} to {wide:,.0f}", "", "")
    made.add_row("  whole layers", str(reading.layers), f"{reading.width:,}", "", "")
    heads = f"{usable['heads']} × {usable['head_dim']}"
    made.add_row("  whole heads", str(usable["layers"]), f"{usable['width']:,}", heads, short(usable["params"]))
    return made


def _words(reading: Depth, said: str) -> list[str]:
    lines = []
    if reading.reason is not None:
        lines.append(f"{reading.reason}, {said}.")
        lines += _saved(reading)
    separation = reading.separation
    theory = f"Theory: its threshold log₃ d is {reading.threshold:.1f} layers"
    if separation["low"] is not None:
        theory += (
            f"; log₃ of the separation rank {separation['low']:,.0f} to {separation['high']:,.0f} (recalled bounds)"
        )
    lines.append(f"{theory}, of two tokens at most {separation['two_tokens']:,.0f}.")
    lines += [f"Note: {note}." for note in reading.notes]
    lines.append(
        "Parameters are 12·L·d², without embeddings. The interval is from errors of the fit that are recalled."
    )
    return [*lines, f"Contrary: {'; '.join(reading.contrary)}."]


def _saved(reading: Depth) -> list[str]:
    if reading.saves is None:
        return ["What a better shape would save is not told: the law has no shape so narrow."]
    if not reading.saves or reading.contained is None:
        return []
    layers, width = reading.contained
    within = f"the law's shape within it ({layers:.0f} × {width:,.0f})"
    share = reading.saves / reading.params
    most = f"{short(reading.saves)} of its parameters ({share:.0%})"
    return [f"A better shape that is as able saves between none and {most}, down to {within}."]
