"""Of bench/series.py: the rows of its results, the table of docs/series_sets.md and the critical-difference picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from scipy.stats import rankdata, studentized_range, wilcoxon

DOCS = Path(__file__).parent.parent / "docs"
FEWEST, MANY = 5, 30  # sets of a method that is ranked at all, and with those that ran on nearly all sets
RESAMPLES = 3
NAMES = {"ridge": "ConvolutionRidgeClassifier", "attention": "SeriesClassifier"}
ORDER = ("ridge", "MiniRocket", "Rocket", "QUANT", "1-NN DTW", "attention")


def gathered(stores):
    """{set: {method: {resample: result}}}; results of sets that were not packed go first."""
    found = {}
    for results in stores:
        for key in sorted(results):
            name, seed, method = key.split("/")
            each = found.setdefault(name, {}).setdefault(method, {})
            if seed not in each or each[seed].get("packed"):
                each[seed] = results[key]
    return {name: found[name] for name in sorted(found)}


def mean(found, name, method, metric="accuracy", seeds=None):
    """Over resamples; CPU times of packed sets are those of another machine, and left out."""
    rows = [row for seed, row in found[name].get(method, {}).items() if seeds is None or seed in seeds]
    if metric == "CPU time":
        rows = [row for row in rows if not row.get("packed")]
    return float(np.mean([row[metric] for row in rows])) if rows else None


def compared(found, methods):
    """Sets that all methods have, the resamples they share, accuracies (sets, methods) and mean ranks; 1 is best."""
    shared = {name: set.intersection(*(set(found[name].get(method, {})) for method in methods)) for name in found}
    names = [name for name in found if shared[name]]
    accuracies = np.array([[mean(found, name, method, seeds=shared[name]) for method in methods] for name in names])
    return names, shared, accuracies, rankdata(np.round(-accuracies, 9), axis=1).mean(0)


def critical_difference(methods, sets):
    """Nemenyi's, at .05: mean ranks that differ by less are not significantly different."""
    return studentized_range.ppf(0.95, methods, np.inf) / 2**0.5 * (methods * (methods + 1) / (6 * sets)) ** 0.5


def comparisons(found):
    """The methods that ran on most sets in full, those that ran on most sets at all, and all that can be ranked."""

    def ran(least_sets, resamples):
        counts = {m: sum(len(each.get(m, ())) >= resamples for each in found.values()) for m in ORDER}
        return [method for method in ORDER if counts[method] >= least_sets]

    groups = [ran(MANY, RESAMPLES), ran(MANY, 1), ran(FEWEST, 1)]
    return [group for place, group in enumerate(groups) if group not in groups[:place]]


def write_table(stores):
    """Write table and picture; return the rows of the results file."""
    found, rows = gathered(stores), []
    groups = [(methods, *compared(found, methods)) for methods in comparisons(found)]
    groups[0] = (groups[0][0], *compared(complete(found, groups[0][0]), groups[0][0]))
    for methods, names, shared, accuracies, ranks in groups:
        fits = sum(len(shared[name]) for name in names)
        for method, rank, each in zip(methods, ranks, accuracies.T, strict=True):
            what = f"{method}, {len(names)} series sets ({fits} resamples) beside {len(methods) - 1} others"
            goal = "≤ that of MiniRocket" if method == "ridge" else "—"
            rows.append(figure(f"mean rank of {what}", [rank], "", goal))
            rows.append(figure(f"accuracy of {what}", each, ""))
            errors = [mean(found, name, method, "calibration error", shared[name]) for name in names]
            rows.append(figure(f"calibration error of {what}", errors, ""))
    rows += [duel(found, "ridge", other) for other in ORDER[1:] if any(other in each for each in found.values())]
    for method in ORDER[:1] + ORDER[2:]:
        ratios = [(mean(found, n, method, "CPU time"), mean(found, n, "MiniRocket", "CPU time")) for n in found]
        ratios = [mine / theirs for mine, theirs in ratios if mine and theirs]
        if ratios:
            what = f"CPU time of {method} over MiniRocket, {len(ratios)} series sets"
            rows.append(figure(what, ratios, "×", "≤ 10" if method == "ridge" else "—"))
    rows.append(elsewhere(stores))
    for name in found:
        for method in found[name]:
            each = [row["accuracy"] for row in found[name][method].values()]
            rows.append(figure(f"accuracy of {method}: {name}", each, "") | {"shown": False})
    page = DOCS / "series_sets.md"
    table = sets_table(found)
    page.write_text(re.sub(r"(?<=<!-- sets -->\n).*?(?=<!-- /sets -->)", lambda _: table, page.read_text(), flags=re.S))
    draw(groups)
    return rows


def elsewhere(stores):
    """CPU time of attention over ridge, where both ran on the CPU of the machine with packed sets."""
    seconds = {key: row["CPU time"] for each in stores for key, row in each.items() if row.get("packed")}
    cpu = [key for each in stores for key, row in each.items() if row.get("device", "cpu") == "cpu"]
    pairs = [(seconds[key], seconds.get(key.replace("attention", "ridge"))) for key in cpu if key in seconds]
    ratios = [mine / theirs for mine, theirs in pairs if theirs and mine != theirs]
    return figure(f"CPU time of attention over ridge, {len(ratios)} fits on another machine", ratios, "×")


def complete(found, methods):
    """The sets on which all these methods ran every resample."""
    return {n: each for n, each in found.items() if all(len(each.get(m, ())) == RESAMPLES for m in methods)}


def duel(found, first, second):
    """Sets won, tied and lost, and Wilcoxon's p."""
    whole = complete(found, [first, second])
    names, _shared, accuracies, _ranks = compared(whole if len(whole) >= FEWEST else found, [first, second])
    wins = np.sign(np.round(accuracies[:, 0] - accuracies[:, 1], 9))
    p = float(wilcoxon(accuracies[:, 0], accuracies[:, 1]).pvalue) if wins.any() else 1.0
    row = figure(f"p of {first} against {second}, Wilcoxon signed rank, {len(names)} series sets", [p], "")
    row |= {"won": int((wins > 0).sum()), "tied": int((wins == 0).sum()), "lost": int((wins < 0).sum())}
    print(row["won"], row["tied"], row["lost"], accuracies.mean(0))
    return row


def sets_table(found):
    """Mean accuracies of every set, the best in bold; an asterisk marks fewer than three resamples."""
    methods = [method for method in ORDER if any(method in each for each in found.values())]
    lines = [
        "| set | " + " | ".join(NAMES.get(method, method) for method in methods) + " |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for name in found:
        means = {method: mean(found, name, method) for method in methods if method in found[name]}
        cells = []
        for method in methods:
            text = f"{means[method]:.3f}" if method in means else "—"
            text = f"**{text}**" if method in means and f"{max(means.values()):.3f}" == text else text
            cells.append(text + ("*" if method in means and len(found[name][method]) < RESAMPLES else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
    rows = [len(methods) + 3 for methods, *_ in groups]
    picture, axes = plt.subplots(len(groups), figsize=(7, 0.28 * sum(rows)), squeeze=False, height_ratios=rows)
    for axis, (methods, names, shared, _accuracies, ranks) in zip(axes[:, 0], groups, strict=True):
        reach = critical_difference(len(methods), len(names))
        axis.set(
            xlim=(len(methods) + 0.15, 0.85),
            ylim=(-0.4, len(methods) + 0.6),
            yticks=[],
            xlabel=f"mean rank, {len(names)} sets, {sum(len(shared[name]) for name in names)} resamples",
        )
        axis.spines[["left", "right", "top"]].set_visible(False)
        for place, index in enumerate(np.argsort(ranks)):
            axis.plot(ranks[index], 0, "o", color="C0", clip_on=False)
            label = f"{NAMES.get(methods[index], methods[index])} {ranks[index]:.2f}"
            axis.annotate(
                label,
                (ranks[index], 0),
                (ranks[index], len(methods) - place),
                ha="right",
                va="center",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "relpos": (1, 0)},
            )
        spans = [(rank, ranks[ranks <= rank + reach].max()) for rank in sorted(ranks)]
        spans = [span for place, span in enumerate(spans) if not place or span[1] > spans[place - 1][1]]
        for place, span in enumerate(span for span in spans if span[0] < span[1]):
            axis.plot(span, [0.35 + 0.25 * place] * 2, color="0.5", lw=3)
    picture.tight_layout()
    picture.savefig(DOCS / "figures" / "series_ranks.svg", metadata={"Date": None})
