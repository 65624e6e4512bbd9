"""Figure of the study `lineage`: both statistics by how far the weights have moved."""

from __future__ import annotations

from typing import Any

from keyquery.pages.colours import LIGHT
from keyquery_studies.lineage.study import Kinship
from keyquery_studies.lineage.summary import TESTS

KINDS = {
    "tuned": "o",
    "continued": "s",
    "retrained": "^",
    "all but rescaling, retrained": "d",
    "LoRA": "v",
    "noise": "x",
}


def trail(reading: Kinship, pyplot: Any) -> Any:
    """The statistic of each model by its change; the line is the largest of unrelated pairs."""
    figure, axes = pyplot.subplots(1, 2, figsize=(7.2, 3.0), sharex=True, layout="constrained")
    for axis, (name, test), colour in zip(axes, TESTS.items(), LIGHT.values(), strict=False):
        for kind, marker in KINDS.items():
            rows = [row for row in reading.kin if row["kind"].rpartition(" ")[0] == kind and row["change"]]
            points = [row["change"] for row in rows], [max(row[name], 0.5) for row in rows]
            axis.plot(*points, marker, color=colour, alpha=0.5, markersize=3, label=kind)
        axis.axhline(max(row[name] for row in reading.null), color="0.4", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=test, xlabel="median ‖ΔM‖/‖M‖")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("statistic")
    axes[1].legend(frameon=False, fontsize=7)
    return figure
