"""Of bench/series.py: the rows of its results, the table of docs/series.md and the critical-difference picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from scipy.stats import rankdata, studentized_range, wilcoxon

DOCS = Path(__file__).parent.parent / "docs"
FEWEST = 5  # sets of a method that is ranked
NAMES = {"ridge": "ConvolutionRidgeClassifier", "attention": "SeriesClassifier"}


def gathered(results):
    """{set: {method: [result of each resample]}}."""
    found = {}
    for key in sorted(results):
        name, _seed, method = key.split("/")
        found.setdefault(name, {}).setdefault(method, []).append(results[key])
    return found


def mean(found, name, method, metric="accuracy"):
    return float(np.mean([one[metric] for one in found[name][method]]))


def compared(found, methods):
    """Sets that all methods have, accuracies (sets, methods) and mean ranks; 1 is the best."""
    names = [name for name in found if all(method in found[name] for method in methods)]
    accuracies = np.array([[mean(found, name, method) for method in methods] for name in names])
    return names, accuracies, rankdata(-accuracies, axis=1).mean(0)


def critical_difference(methods, sets):
    """Nemenyi's, at .05: mean ranks that differ by less are not significantly different."""
    return studentized_range.ppf(0.95, methods, np.inf) / 2**0.5 * (methods * (methods + 1) / (6 * sets)) ** 0.5


def comparisons(found):
    """The methods that share most sets, and all methods of enough sets."""
    every = {method for each in found.values() for method in each}
    every = {method for method in every if sum(method in each for each in found.values()) >= FEWEST}
    most = max(sum(method in each for each in found.values()) for method in every)
    full = [method for method in sorted(every) if sum(method in each for each in found.values()) == most]
    return [full] + ([[*full, *sorted(every - set(full))]] if every - set(full) else [])


def write_table(results):
    """Write table and picture; return the rows of the results file."""
    found, rows, lines = gathered(results), [], []
    groups = comparisons(found)
    for methods in groups:
        names, accuracies, ranks = compared(found, methods)
        for method, rank, each in zip(methods, ranks, accuracies.T, strict=True):
            what = f"{method}, {len(names)} series sets beside {len(methods) - 1} other(s)"
            rows.append(
                figure(f"mean rank of {what}", [rank], "", "≤ that of MiniRocket" if method == "ridge" else "—")
            )
            rows.append(figure(f"accuracy of {what}", each, ""))
            for metric, unit in (("calibration error", ""), ("CPU time", "s")):
                values = [mean(found, name, method, metric) for name in names]
                rows.append(figure(f"{metric} of {what}", values, unit))
    names, accuracies, _ranks = compared(found, ["ridge", "MiniRocket"])
    ratios = [mean(found, n, "ridge", "CPU time") / mean(found, n, "MiniRocket", "CPU time") for n in names]
    rows.append(figure("CPU time of ridge over MiniRocket", ratios, "×", "≤ 10"))
    wins = np.sign(accuracies[:, 0] - accuracies[:, 1])
    p = float(wilcoxon(accuracies[:, 0], accuracies[:, 1]).pvalue)
    rows.append(figure("p of ridge against MiniRocket, Wilcoxon signed rank", [p], ""))
    rows[-1] |= {"won": int((wins > 0).sum()), "tied": int((wins == 0).sum()), "lost": int((wins < 0).sum())}
    methods = sorted({method for each in found.values() for method in each})
    lines = [
        "| set | " + " | ".join(NAMES.get(method, method) for method in methods) + " |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for name in found:
        cells = [f"{mean(found, name, method):.3f}" if method in found[name] else "—" for method in methods]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        for method in found[name]:
            each = [one["accuracy"] for one in found[name][method]]
            rows.append(figure(f"accuracy of {method}: {name}", each, "") | {"shown": False})
    page = DOCS / "series.md"
    table = "\n".join(lines) + "\n"
    page.write_text(re.sub(r"(?<=<!-- sets -->\n).*?(?=<!-- /sets -->)", lambda _: table, page.read_text(), flags=re.S))
    draw([(methods, *compared(found, methods)) for methods in groups])
    return rows


def figure(what, values, unit, goal="—"):
    values = [float(value) for value in values]
    print(f"{what}: {np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}) {unit}", flush=True)
    bounds = {"low": min(values), "high": max(values)}
    return {"what": what, "value": float(np.mean(values)), **bounds, "unit": unit, "goal": goal}


def draw(groups):
    """Mean ranks on a line each; methods joined by a bar do not differ significantly."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "series", "svg.fonttype": "none", "font.size": 9}
    picture, axes = plt.subplots(len(groups), figsize=(7, 1.7 * len(groups)), squeeze=False)
    for axis, (methods, names, _accuracies, ranks) in zip(axes[:, 0], groups, strict=True):
        reach = critical_difference(len(methods), len(names))
        axis.set(xlim=(len(methods) + 0.15, 0.85), ylim=(-1.6, 1), yticks=[], xlabel=f"mean rank, {len(names)} sets")
        axis.spines[["left", "right", "top"]].set_visible(False)
        for place, index in enumerate(np.argsort(ranks)):
            axis.plot(ranks[index], -1.4, "o", color="C0", clip_on=False)
            label = f"{NAMES.get(methods[index], methods[index])} {ranks[index]:.2f}"
            axis.annotate(
                label,
                (ranks[index], -1.4),
                (ranks[index], 0.7 - 0.45 * (place % 4)),
                ha="center",
                arrowprops={"arrowstyle": "-", "lw": 0.5},
            )
        for rank in ranks:
            joined = ranks[(ranks >= rank) & (ranks <= rank + reach)]
            if len(joined) > 1:
                axis.plot([joined.min(), joined.max()], [-1.2, -1.2], color="0.5", lw=3)
    picture.tight_layout()
    picture.savefig(DOCS / "figures" / "series_ranks.svg", metadata={"Date": None})
