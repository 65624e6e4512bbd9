"""Figure of the study `rerank`: gain of each method over the first-stage ranking."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from keyquery.pages.colours import KERNELS
from keyquery_studies.rerank.study import LEARNED, METHODS, PLACE, SIZES, RerankStudy

TITLES = {"images": "Images", "digits": "Digits", "texts": "Texts", "stretches": "Stretches of texts"}
CALLED = {"affinity": "affinity alone", "expansion": "query expansion", "reciprocal": "k-reciprocal"}
PLAIN = "#8c959f"


def title_of(dataset: str) -> str:
    """The display name of a dataset."""
    return TITLES.get(dataset, dataset)


def size_of(row: Mapping[str, Any]) -> str:
    """Sizes of lists and networks."""
    return f"K = {row['top']:,}, L = {row['anchors']:,}, width {row['width']}, {row['steps']} steps"


def ranks(reading: RerankStudy, pyplot: Any) -> Any:
    """Gain in mAP (filled: top of the list re-ranked; hollow: whole database).

    One column per dataset, one row per size of lists and networks.
    """
    rows = [row for row in reading.summary() if row["scope"] is not None]
    datasets = list(dict.fromkeys((row["dataset"], row["digest"]) for row in rows))
    sizes = list(dict.fromkeys(map(itemgetter(*SIZES), rows)))
    methods = [method for method in METHODS[1:] if any(row["method"] == method for row in rows)][::-1]
    shape = (len(sizes), len(datasets))
    figsize = (1.4 + 2.3 * shape[1], 0.4 + (0.5 + 0.24 * len(methods)) * shape[0])
    figure, axes = pyplot.subplots(*shape, figsize=figsize, layout="constrained", squeeze=False, sharey=True)
    for line, size in zip(axes, sizes, strict=True):
        for axis, dataset in zip(line, datasets, strict=True):
            _panel(axis, [row for row in rows if itemgetter(*PLACE)(row) == (*dataset, *size)], methods)
            axis.set_title(title_of(dataset[0]))
        if len(sizes) > 1:
            line[0].set_title(f"{size_of(dict(zip(SIZES, size, strict=True)))}\n", loc="left", fontweight="bold")
    figure.supxlabel("gain in mAP over the first stage (filled: top re-ranked; hollow: whole database)", fontsize=7)
    return figure


def _panel(axis: Any, rows: list[dict[str, Any]], methods: list[str]) -> None:
    axis.axvline(0, color="#24292f", linewidth=0.8)
    for row in rows:
        _dot(axis, row, methods.index(row["method"]))
    axis.set_ylim(-0.6, len(methods) - 0.4)
    axis.set_yticks(range(len(methods)), [CALLED.get(method, method) for method in methods])
    axis.tick_params(axis="y", length=0)
    axis.locator_params(axis="x", nbins=4)
    axis.margins(x=0.15)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _dot(axis: Any, row: dict[str, Any], place: int) -> None:
    colour = KERNELS[row["method"].removeprefix("learned, ")] if row["method"] in LEARNED else PLAIN
    whole = row["scope"] == "whole"
    face = "none" if whole else colour
    look = {"fmt": "o", "color": colour, "markerfacecolor": face, "markersize": 5, "capsize": 2, "linewidth": 1}
    axis.errorbar(row["gain"], place + (0.16 if whole else 0), xerr=row["gain_sd"] or 0.0, **look)
