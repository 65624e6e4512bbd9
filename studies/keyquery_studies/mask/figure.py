"""Figure of the study `mask`: the parts of every layer, arm by arm."""

from __future__ import annotations

from typing import Any

from keyquery.pages.colours import LIGHT
from keyquery_studies.mask.study import ARMS, Masks


def shares(reading: Masks, pyplot: Any) -> Any:
    """Stacked shares by layer in the longest window: a row per position encoding, a column per arm."""
    rows = reading.layers()
    longest = max(row["window"] for row in rows)
    figure, axes = pyplot.subplots(2, len(ARMS), figsize=(7.2, 3.6), sharex=True, sharey=True, layout="constrained")
    for axis, (rope, objective) in zip(axes.flat, ((r, o) for r in (False, True) for o in ARMS), strict=True):
        layers = [r for r in rows if (r["window"], r["rope"], r["objective"]) == (longest, rope, objective)]
        left = [0.0] * len(layers)
        for part, colour in LIGHT.items():
            widths = [max(row[part], 0.0) for row in layers]
            axis.barh([row["layer"] for row in layers], widths, left=left, color=colour, label=part, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.set(title=f"{objective}, {'RoPE' if rope else 'learned'}", xlim=(0, 1.05))
        axis.set_yticks([row["layer"] for row in layers], [f"layer {row['layer']}" for row in layers])
        axis.invert_yaxis() if axis is axes.flat[0] else None
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"share of the variance of scores in windows of {longest} tokens, mean over heads and seeds", fontsize=8
    )
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure
