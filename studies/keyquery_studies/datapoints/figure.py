"""Figure of the study `datapoints`: errors compared with other models, corruption, and cross-row heads."""

from __future__ import annotations

from typing import Any

from keyquery.pages.colours import KERNELS, LIGHT
from keyquery_studies.datapoints.study import CLAIMS, GROWTH, DatapointStudy
from keyquery_studies.datapoints.tables import TABLES

TITLES = {
    "boston": "Boston",
    "yacht": "Yacht",
    "concrete": "Concrete",
    "breast": "Breast cancer",
    "protein": "Protein",
    "adult": "Adult",
    "poker": "Poker",
    "forest": "Forest cover",
    "higgs": "HIGGS",
}
CALLED = {
    "published": "NPT, published",
    "inductive": "NPT, inductive",
    "boosting": "boosted trees",
    "neighbours": "nearest neighbours",
    "perceptron": "MLP",
}
COLOURS = {
    "published": "#8250df",
    "inductive": "#2166ac",
    "boosting": "#2a9d8f",
    "neighbours": "#d6701c",
    "perceptron": "#b03a8c",
}
GREY = "#8c959f"
ACROSS = 4  # tables beside each other
TICKS = (0.5, 1, 2, 3, 5, 10, 20)


def between(reading: DatapointStudy, pyplot: Any) -> Any:
    """Top: errors per table; below: effect of corrupted rows, and symmetry of heads; kernels, if compared."""
    rows = reading.summary()
    errors = [row for row in rows if row["part"] in ("npt", "baselines")]
    ours = [row for row in rows if row["part"] == "npt"]
    kernels = [row for row in rows if row["part"] == "kernels"]
    if not errors and not kernels:
        raise ValueError("a study of look-ups alone has no figure: it needs the part npt, baselines or kernels")
    names = [name for name in TABLES if any(row["table"] == name for row in errors)]
    lines = -(-len(names) // ACROSS)
    heights = [1.9 * lines] * bool(errors) + [2.2] * bool(ours) + [1.8] * bool(kernels)
    figure = pyplot.figure(figsize=(7.4, sum(heights)), layout="constrained")
    places = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if errors:
        _errors(next(places), names, errors)
    if ours:
        below = next(places)
        left, right = below.subplots(1, 2)
        _growth(left, ours)
        _heads(right, ours)
    if kernels:
        _kernels(next(places), kernels)
    return figure


def error_of(metrics: dict[str, Any]) -> tuple[float, float] | None:
    """RMSE, or classification error in percent, and its standard error."""
    if metrics.get("rmse") is not None:
        return metrics["rmse"], metrics["rmse_se"] or 0.0
    if metrics.get("accuracy") is None:
        return None
    return 100 * (1 - metrics["accuracy"]), 100 * (metrics["accuracy_se"] or 0.0)


def claimed(table: str, model: str) -> dict[str, Any]:
    """Published metrics of a model, with the keys of a summary."""
    published = CLAIMS.get(table, {}).get(model, {})
    return {
        key: value for name, pair in published.items() for key, value in zip((name, f"{name}_se"), pair, strict=True)
    }


def _errors(figure: Any, names: list[str], rows: list[dict[str, Any]]) -> None:
    """One panel per table; hollow: published."""
    models = [model for model in CALLED if any(row["model"] == model for row in rows)][::-1]
    lines = -(-len(names) // ACROSS)
    axes = figure.subplots(lines, min(len(names), ACROSS), sharey=True, squeeze=False).flatten()
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes, names, strict=False):
        for row in rows:
            if row["table"] == name:
                _dot(axis, error_of(row), models.index(row["model"]), COLOURS[row["model"]], "full")
        for place, model in enumerate(models):
            _dot(axis, error_of(claimed(name, model)), place - 0.28, COLOURS[model], "none")
        wrong = TABLES[name].classes
        axis.set(title=TITLES[name], xlabel="error (%)" if wrong else "RMSE", ylim=(-0.7, len(models) - 0.5))
        axis.set_yticks(range(len(models)), [CALLED[model] for model in models])
        axis.margins(x=0.12)
        if wrong:
            axis.locator_params(axis="x", nbins=4)
        else:  # nearest neighbours may be far off
            axis.set_xscale("log")
            low, high = axis.get_xlim()
            axis.set_xticks([tick for tick in TICKS if low <= tick <= high])
            axis.xaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#d0d7de", linewidth=0.4)
    figure.supxlabel("Test error per table (mean ± s.e. over folds; hollow: published)", fontsize=7)


def _dot(axis: Any, at: tuple[float, float] | None, place: float, colour: str, fill: str) -> None:
    if at is not None:
        look = {"color": colour, "fmt": "o", "markersize": 4, "capsize": 2, "linewidth": 1}
        axis.errorbar(at[0], place, xerr=at[1] or None, fillstyle=fill, alpha=1.0 if fill == "full" else 0.6, **look)


def _growth(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Increase in error when all other rows are corrupted."""
    names = [name for name in TABLES if any(row["table"] == name for row in rows)][::-1]
    for row in rows:
        place = names.index(row["table"]) + (0.17 if row["model"] == "published" else -0.17)
        if row["grows"] is not None:
            spread = None if row["grows_se"] is None else 100 * row["grows_se"]
            axis.barh(place, 100 * row["grows"], 0.3, color=COLOURS[row["model"]], xerr=spread, error_kw={"lw": 0.8})
    for place, name in enumerate(names):
        if name in GROWTH:
            axis.plot([100 * GROWTH[name]] * 2, [place - 0.4, place + 0.4], color="#24292f", linewidth=1.2)
    axis.axvline(0, color=GREY, linewidth=0.6)
    axis.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axis.set(title="Other rows corrupted", xlabel="increase in error (%; classes: points); line: published")
    axis.spines[["top", "right"]].set_visible(False)


def _heads(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Symmetric share of cross-row heads, in weights and on data, compared with initialisation."""
    analysed = [row for row in rows if row.get("symmetric") is not None]
    order = sorted(analysed, key=lambda row: (list(TABLES).index(row["table"]), row["model"] != "published"))[::-1]
    for place, row in enumerate(order):
        for name, marker, colour in (("symmetric", "s", LIGHT["symmetric"]), ("on_data", "o", LIGHT["skew"])):
            axis.plot([row[f"{name}_at_start"], row[name]], [place] * 2, color=colour, linewidth=1, alpha=0.5)
            axis.plot(row[f"{name}_at_start"], place, marker, color=GREY, markersize=3.5)
            label = {"symmetric": "weights", "on_data": "on data"}[name] if place == 0 else None
            spread = row[f"{name}_se"]
            axis.errorbar(row[name], place, xerr=spread, fmt=marker, color=colour, markersize=4, label=label, capsize=2)
    axis.axvline(0.5, color=GREY, linewidth=0.6, linestyle=":")
    axis.set_yticks(range(len(order)), [f"{TITLES[row['table']]}, {row['model']}" for row in order])
    axis.set(title="Cross-row heads", xlabel="symmetric share (grey: at initialisation)", xlim=(0, 1.02))
    axis.legend(frameon=False, fontsize=7, loc="center left")
    axis.spines[["top", "right"]].set_visible(False)


def _kernels(figure: Any, rows: list[dict[str, Any]]) -> None:
    names = [name for name in TABLES if any(row["table"] == name for row in rows)]
    kernels = [kernel for kernel in KERNELS if any(row["model"] == kernel for row in rows)][::-1]
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        for row in rows:
            if row["table"] == name:
                _dot(axis, error_of(row), kernels.index(row["model"]), KERNELS[row["model"]], "full")
        wrong = TABLES[name].classes
        axis.set(title=f"Cross-row kernels: {TITLES[name]}", xlabel="error (%)" if wrong else "RMSE")
        axis.set_yticks(range(len(kernels)), kernels)
        axis.margins(x=0.15, y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
