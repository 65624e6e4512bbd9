"""Figure of the study `kernels`: error by sample size, and losses in language models."""

from __future__ import annotations

from itertools import product
from typing import Any

from keyquery.pages.colours import KERNELS
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.kernels.arms import ARMS
from keyquery_studies.kernels.study import Kernels
from keyquery_studies.kernels.synthetic import TASKS

COLOURS = {"symmetric init": "#57606a", "symmetric": KERNELS["symmetric"], "split": KERNELS["split"]}
TRUTHS = {"smoothing": "symmetric truth: smoothing", "look-up": "skew truth: look-up"}


def panels(reading: Kernels, pyplot: Any) -> Any:
    """Top: error on both synthetic tasks by sample size; below: Δ cross-entropy to the unconstrained kernel."""
    rows = reading.summary()
    synthetic = [row for row in rows if row["part"] == "synthetic"]
    trained = {"language": reading.language, "longer": reading.longer}
    gaps = {part: [row for row in rows if row["part"] == part and row["gap"] is not None] for part in trained}
    gaps = {part: own for part, own in gaps.items() if own}
    if not synthetic and not gaps:
        raise ValueError("a study of initialisation alone has no figure: it needs another part")
    heights = [2.6] * bool(synthetic) + [2.3] * len(gaps)
    figure = pyplot.figure(figsize=(8.6, sum(heights)), layout="constrained")
    places = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if synthetic:
        _errors(next(places), synthetic)
    for part, own in gaps.items():
        steps = {"language": min, "longer": max}[part](row["steps"] for row in trained[part])
        size = max(row["parameters"] for row in own) / 1e6
        _gaps(next(places), own, f"language models of {size:.2g} million parameters, up to {steps:,} steps")
    return figure


def _errors(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots(1, len(TASKS), sharey=True)
    for axis, task in zip(axes, TASKS, strict=True):
        for kernel, colour in KERNELS.items():
            curve = [row for row in rows if (row["task"], row["kernel"]) == (task, kernel)]
            at, error = [row["samples"] for row in curve], [row["error"] for row in curve]
            spread = [row["error_sd"] or 0.0 for row in curve]
            low = [max(e - s, e / 3) for e, s in zip(error, spread, strict=True)]  # a log axis has no zero
            high = [e + s for e, s in zip(error, spread, strict=True)]
            axis.plot(at, error, color=colour, label=kernel, linewidth=1.3, marker="o", markersize=2.5)
            axis.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.axhline(1, color="#8c959f", linewidth=0.6, linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="training sequences", title=TRUTHS[task])
        sizes = sorted({row["samples"] for row in rows})
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("error (1: uninformed)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)


def _gaps(figure: Any, rows: list[dict[str, Any]], title: str) -> None:
    """Differences to the unconstrained kernel with 95 % intervals, a panel per objective and share of the text."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    present = {(row["objective"], row["share"]) for row in rows}
    columns = [place for place in product(OBJECTIVES, shares) if place in present]
    places = [(arm, rope) for rope in (True, False) for arm in list(ARMS)[:0:-1]]  # bottom to top
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, (objective, share) in zip(axes, columns, strict=True):
        axis.axvline(0, color=KERNELS["general"], linewidth=0.8)
        for row in rows:
            if (row["objective"], row["share"]) != (objective, share):
                continue
            low, high = (row["gap"] if row[name] is None else row[name] for name in ("gap_low", "gap_high"))
            spread = [[row["gap"] - low], [high - row["gap"]]]
            look = {"color": COLOURS[row["arm"]], "fmt": "o", "markersize": 4, "capsize": 2}
            axis.errorbar(row["gap"], places.index((row["arm"], row["rope"])), xerr=spread, **look)
        place = f"{objective}, {'all text' if share == 1 else f'{share:.0%} of it'}"
        axis.set(title=place, ylim=(-0.6, len(places) - 0.4))
        axis.axhline(len(places) / 2 - 0.5, color="#d0d7de", linewidth=0.6)
        axis.set_yticks(range(len(places)), [f"{arm}, {'RoPE' if rope else 'learned'}" for arm, rope in places])
        axis.margins(x=0.15)
        axis.locator_params(axis="x", nbins=4)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.supxlabel("Δ cross-entropy to unconstrained, nats per token, 95 % intervals (positive is worse)", fontsize=8)
