"""Flow as a figure: a map of layers by heads above chance, and curves over layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.flow.flow import Flow
from keyquery.pages.colours import LIGHT
from keyquery.report.flow.page import depths, views
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional


def flow_map(reading: Flow, pyplot: Any, view: str = "flow") -> Any:
    """A map of heads in one view, and layer means and rollout against their null levels."""
    seen = views(reading)
    check_choice("view", view, tuple(seen))
    values, each = seen[view], np.array(depths(reading))
    rows, columns = values.shape
    size = (1.6 + max(0.22 * columns, 1.2) + 2.2, max(1.2 + 0.2 * rows, 2.2))
    figure, axes = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True, width_ratios=[1.3, 1])
    steps = [LIGHT["skew"], "#f2f4f6", LIGHT["symmetric"]]
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("flow", steps)
    scale = 1.0 if view == "reciprocity" else 100.0
    most = float(np.nanmax(np.abs(values))) * scale or 1.0
    image = axes[0].imshow(scale * values, vmin=-most, vmax=most, cmap=colours, aspect="auto")
    title = "reciprocity" if view == "reciprocity" else f"{view}, points above chance"
    axes[0].set(xlabel="head", ylabel="layer", title=title)
    axes[0].locator_params(integer=True, nbins=12)
    figure.colorbar(image, ax=axes[0], location="left", shrink=0.8, ticks=[-most, 0, most], format="%.2g")
    lines = ((0, "mean over heads", "#59636e"), (2, "rollout", LIGHT["popularity"]))
    for column, label, colour in lines:
        axes[1].plot(100 * each[:, column], range(rows), color=colour, marker="o", markersize=2.5, label=label)
        axes[1].plot(100 * each[:, column + 1], range(rows), color=colour, linestyle=":", linewidth=0.9)
    axes[1].set(xlabel="% cross-modal (dotted: chance)", xlim=(0, None))
    axes[1].legend(frameon=False, loc="best", fontsize=7)
    axes[1].spines[["top", "right"]].set_visible(False)
    figure.suptitle(str(reading.model["name"]), weight="bold")
    return figure
