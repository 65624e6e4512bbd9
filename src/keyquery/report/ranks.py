"""The study of re-ranking as a picture: what each method gains over the first round."""

from __future__ import annotations

from typing import Any

from keyquery.report.colours import KERNELS
from keyquery.studies.rerank import LEARNED, METHODS, RerankStudy

TITLES = {"images": "Images", "digits": "Digits", "texts": "Texts", "stretches": "Stretches of texts"}
CALLED = {"affinity": "affinity alone", "expansion": "query expansion", "reciprocal": "k-reciprocal"}
PLAIN = "#8c959f"


def title_of(dataset: str) -> str:
    """How a set is called where it is shown.

    >>> title_of("images"), title_of("roxford5k")
    ('Images', 'roxford5k')
    """
    return TITLES.get(dataset, dataset)


def ranks(reading: RerankStudy, pyplot: Any) -> Any:
    """A panel a set: gain in mAP, full marks of the top put in order, hollow ones of the whole database ranked anew."""
    rows = [row for row in reading.summary() if row["scope"] is not None]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    methods = [method for method in METHODS[1:] if any(row["method"] == method for row in rows)][::-1]
    size = (1.4 + 2.3 * len(datasets), 0.9 + 0.24 * len(methods))
    figure, axes = pyplot.subplots(1, len(datasets), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, dataset in zip(axes[0], datasets, strict=True):
        axis.axvline(0, color="#24292f", linewidth=0.8)
        for row in rows:
            if row["dataset"] == dataset:
                _dot(axis, row, methods.index(row["method"]))
        axis.set(title=title_of(dataset), ylim=(-0.6, len(methods) - 0.4))
        axis.set_yticks(range(len(methods)), [CALLED.get(method, method) for method in methods])
        axis.tick_params(axis="y", length=0)
        axis.locator_params(axis="x", nbins=4)
        axis.margins(x=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel(
        "mAP less that of the first round (full: the top put in order, hollow: the whole database)", fontsize=7
    )
    return figure


def _dot(axis: Any, row: dict[str, Any], place: int) -> None:
    colour = KERNELS[row["method"].removeprefix("learned, ")] if row["method"] in LEARNED else PLAIN
    whole = row["scope"] == "whole"
    face = "none" if whole else colour
    look = {"fmt": "o", "color": colour, "markerfacecolor": face, "markersize": 5, "capsize": 2, "linewidth": 1}
    axis.errorbar(row["gain"], place + (0.16 if whole else 0), xerr=row["gain_sd"] or 0.0, **look)
