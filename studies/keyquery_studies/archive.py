"""Studies that are not run any more: their published results, and what their pages derive from them.

The commit that ran them last is named on the page of each, in docs/studies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.stats import linregress, spearmanr, t

from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.rows import grouped, over_seeds, selected
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.study import StudyReading

DRAWS = 1000  # of the bootstrap
BASELINES = ("boosting", "neighbours", "perceptron")
# Each factor of the grid: the two cells (transductive, masked) whose mean is compared with that of the other two.
FACTORS = {
    "test rows present": ((True, False), (True, True)),
    "targets masked": ((False, True), (True, True)),
    "interaction": ((True, True), (False, False)),
}


@dataclass(frozen=True, kw_only=True)
class DepthStudy(StudyReading, kind="depth study"):
    """Loss per training for every depth and parameter count, and the score parts of the heads."""

    rows: Sequence[Mapping[str, Any]]  # one per training; `mix` has the means over heads of each layer
    diverged: Sequence[Mapping[str, Any]] = ()  # trainings that diverged: the learning rate was too high

    def chosen(self) -> list[dict[str, Any]]:
        """The trainings of every shape at its best rate by validation; `edge` if no lower or no higher was tried."""
        chosen = []
        for shape, rows in sorted(grouped(self.rows, ("budget", "layers")).items()):
            first = [row for row in rows if row["seed"] == min(r["seed"] for r in rows)]
            rate = min(first, key=lambda row: row["validation"])["rate"]
            tried = {row["rate"] for row in rows}
            place = {"budget": shape[0], "layers": shape[1], "edge": rate in (min(tried), max(tried))}
            chosen += [{**row, **place, **_parts(row["mix"])} for row in rows if row["rate"] == rate]
        return chosen

    def summary(self) -> list[dict[str, Any]]:
        """One row per shape: test loss and symmetric share of its heads, mean and sd over seeds."""
        keys = ("budget", "layers", "width", "parameters", "rate", "edge")
        return over_seeds(self.chosen(), keys, ("loss", "pairwise_symmetric", "raw_symmetric"))

    def trends(self) -> list[dict[str, Any]]:
        """Per parameter count: the change of both symmetric shares as the depth grows by a factor of e, with 95 %."""
        trends = []
        for (budget,), rows in grouped(self.chosen(), ("budget",)).items():
            depths = [math.log(row["layers"]) for row in rows]
            changes = {}
            for name in ("pairwise_symmetric", "raw_symmetric"):
                fit = linregress(depths, [row[name] for row in rows])
                half = t.ppf(0.975, len(rows) - 2) * fit.stderr
                changes[name] = {"change": fit.slope, "low": fit.slope - half, "high": fit.slope + half}
            trends.append({"budget": budget, "trainings": len(rows), **changes})
        return trends


def _parts(layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """symmetric/(symmetric + skew) of scores and of weights, means over the layers of a model."""
    symmetric, skew = (mean(layer[name] for layer in layers) for name in ("symmetric", "skew"))
    raw = mean((1 + layer["raw_symmetry"]) / 2 for layer in layers)
    return {"pairwise_symmetric": symmetric / (symmetric + skew), "raw_symmetric": raw}


@dataclass(frozen=True, kw_only=True)
class TransportStudy(StudyReading, kind="transport study"):
    """Accuracy and cost of every method, trajectories of Transformers, and the effect of a pre-trained head."""

    rows: Sequence[Mapping[str, Any]]  # one per training of one method on one dataset
    courses: Sequence[Mapping[str, Any]]  # one per training that was followed; `starts` by where it is followed from
    begun: Sequence[Mapping[str, Any]]  # one per training with or without a pre-trained head

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per dataset and method.

        `gap` is the accuracy minus that of the Transformer of the same seed; `times` how many times less CPU time.
        """
        rows = []
        for row in self.rows:
            [base] = selected(self.rows, dataset=row["dataset"], method="transformer", seed=row["seed"])
            gap, times = row["accuracy"] - base["accuracy"], base["seconds"] / row["seconds"]
            rows.append({**row, "gap": gap, "times": times})
        return over_seeds(rows, ("dataset", "method"), ("accuracy", "seconds", "megabytes", "gap", "times"))

    def contrasts(self) -> list[dict[str, Any]]:
        """Paired by seed: accuracy of `ot` minus that of each other method, p by Holm over the datasets of a method;
        and epochs with a pre-trained head minus those without, p by Holm over all.
        """
        rows = []
        for other in dict.fromkeys(row["method"] for row in self.rows if row["method"] != "ot"):
            family = []
            for name in dict.fromkeys(row["dataset"] for row in self.rows):
                ours, theirs = (selected(self.rows, dataset=name, method=method) for method in ("ot", other))
                if ours and theirs:
                    place = {"of": "accuracy", "dataset": name, "arm": "ot", "less": other}
                    family.append({**place, **difference(ours, theirs, "accuracy")})
            rows += corrected(family)
        family = []
        for name, start in dict.fromkeys((row["dataset"], row["start"]) for row in self.begun):
            if start != "none":
                with_start, without = (selected(self.begun, dataset=name, start=one) for one in (start, "none"))
                place = {"of": "epochs", "dataset": name, "arm": start, "less": "none"}
                family.append({**place, **difference(with_start, without, "reached")})
        return rows + corrected(family)

    def followed(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per network, dataset and starting point of the trajectory."""
        names = [name for name, value in self._courses()[0].items() if isinstance(value, float)]
        return over_seeds(self._courses(), ("network", "start", "classes", "i"), names)

    def starts(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per dataset and initialisation: epochs to convergence, and accuracy."""
        return over_seeds(self.begun, ("dataset", "start"), ("reached", "accuracy"))

    def _courses(self) -> list[dict[str, Any]]:
        return [
            {**{key: value for key, value in row.items() if key != "starts"}, "start": start, **metrics}
            for row in self.courses
            for start, metrics in row["starts"].items()
        ]


@dataclass(frozen=True, kw_only=True)
class VisionLanguageStudy(StudyReading, kind="vision-language study"):
    """Accuracy of every variant, loss with ablated score parts, and the correlation of flow with the loss."""

    rows: Sequence[Mapping[str, Any]]  # one per training

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds, one row per dataset and variant."""
        names = ("matching", "relations", "texts_at_1", "filled", "filled_both")
        return over_seeds(self.rows, ("dataset", "variant"), names)

    def contrasts(self) -> list[dict[str, Any]]:
        """The parser minus every variant, paired by seed, p by Holm over all; `better`: seeds in which it is ahead."""
        runs, rows = grouped(self.rows, ("dataset", "variant")), []
        for (dataset, variant), others in runs.items():
            parser = runs[dataset, "parser"]
            for name in ("matching", "relations", "filled_both") if variant != "parser" else ():
                by_seed = {row["seed"]: row[name] for row in others}
                better = sum(row[name] > by_seed[row["seed"]] for row in parser)
                place = {"dataset": dataset, "less": variant, "of": name, "better": better}
                rows.append({**place, **difference(parser, others, name)})
        return corrected(rows)

    def turned(self) -> list[dict[str, Any]]:
        """Increase of the matching loss without a part in nats, mean and sd over seeds, per variant and task."""
        rows = [
            {"dataset": row["dataset"], "variant": row["variant"], "seed": row["seed"], **change}
            for row in self.rows
            for change in row["turned"]
        ]
        return over_seeds(rows, ("dataset", "variant", "task", "part"), ("change", "loss"))

    def correlations(self) -> list[dict[str, Any]]:
        """Spearman's correlation of flow above chance with the rise of the text loss, a row per dataset, flow and kind.

        Over "training": checkpoints of all trainings, images shuffled. Over "layers": layers of the trained networks,
        other images in that layer alone. Intervals are 95 %, by a bootstrap over trainings.
        """
        rows = []
        for (dataset,), trainings in grouped(self.rows, ("dataset",)).items():
            for kind, name in (("training", "course"), ("layers", "layers")):
                flows = [key for key in trainings[0][name][0] if key not in ("step", "layer", "rise")]
                for flow in flows:
                    points = [[(float(np.mean(p[flow])), p["rise"]) for p in row[name]] for row in trainings]
                    rows.append({"dataset": dataset, "over": kind, "reading": flow, **correlated(points)})
        return rows


def correlated(groups: Sequence[Sequence[tuple[float, float]]], draws: int | None = None) -> dict[str, Any]:
    """Spearman's correlation of all points, with a 95 % interval by a bootstrap over groups."""
    arrays, rng = [np.array(group) for group in groups], np.random.default_rng(0)
    drawn = [
        spearmanr(np.concatenate([arrays[i] for i in rng.integers(len(arrays), size=len(arrays))])).statistic
        for _ in range(draws or DRAWS)
    ]
    whole = np.concatenate(arrays)
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    counts = {"points": len(whole), "trainings": len(arrays)}
    return {"correlation": float(spearmanr(whole).statistic), "low": float(low), "high": float(high), **counts}


@dataclass(frozen=True, kw_only=True)
class DatapointStudy(StudyReading, kind="datapoint study"):
    """Test errors per training, and how networks use other rows; `datapoints` runs the first two parts."""

    npt: Sequence[Mapping[str, Any]]  # one per training: a table, a fold, a protocol
    baselines: Sequence[Mapping[str, Any]]  # one per scikit-learn model, on the same folds
    kernels: Sequence[Mapping[str, Any]] = ()  # as npt, by the kernel between rows
    lookup: Sequence[Mapping[str, Any]] = ()  # one per look-up variant and change of the table
    grid: Sequence[Mapping[str, Any]] = ()  # one per training: transduction × masked targets

    def summary(self) -> list[dict[str, Any]]:
        """Mean and standard error over folds of every metric, per table and model."""
        rows = [
            {**row, "part": part, "model": _model(row)}
            for part in ("npt", "kernels", "baselines", "grid")
            for row in getattr(self, part)
        ]
        summaries = []
        for place, alike in grouped(rows, ("part", "table", "model")).items():
            summary = {**dict(zip(("part", "table", "model"), place, strict=True)), "folds": len(alike)}
            for name in ("rmse", "accuracy", "nll"):
                values = [row[name] for row in alike if row.get(name) is not None]
                summary[name] = mean(values) if values else None
                summary[f"{name}_se"] = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            summaries.append(summary)
        return summaries

    def contrasts(self) -> list[dict[str, Any]]:
        """Paired by fold, named by `of`, within which p is by Holm: models, grid, corrupted (growth of RMSE in %)."""
        models, grown = [], []
        for table in dict.fromkeys(row["table"] for row in self.npt):
            name = "nll" if table == "breast" else "rmse"
            arms: dict[str, list[dict[str, Any]]] = {}
            for row in selected((*self.npt, *self.baselines), table=table):
                arms.setdefault(_model(row), []).append({**row, "seed": row["fold"]})
            baselines = (("inductive", "published"), *((p, m) for m in BASELINES for p in ("inductive", "published")))
            for one, other in baselines:
                if one in arms and other in arms:
                    place = {"of": "models", "table": table, "arm": one, "less": other}
                    models.append(place | difference(arms[one], arms[other], name))
            for protocol in ("published", "inductive"):
                rows = [row for row in arms.get(protocol, ()) if "rmse" in row.get("corrupted", ())]
                after = [{**r, "of": 100 * (r["corrupted"]["rmse"] / r["clean"]["rmse"] - 1)} for r in rows]
                if rows:
                    place = {"of": "corrupted", "table": table, "arm": protocol, "less": "clean"}
                    grown.append(place | difference(after, [{**row, "of": 0.0} for row in rows], "of"))
        return [*corrected(models), *corrected(list(self._factors())), *corrected(grown)]

    def _factors(self) -> Iterator[dict[str, Any]]:
        """The effect of each factor of the grid on RMSE, over the folds that have all four cells."""
        for (table,), rows in grouped(self.grid, ("table",)).items():
            folds = [cells for cells in grouped(rows, ("fold",)).values() if len(cells) == 4]
            for factor, present in FACTORS.items():
                sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
                for cells in folds:
                    for side, wanted in zip(sides, (True, False), strict=True):
                        values = [c["rmse"] for c in cells if ((c["transductive"], c["masked"]) in present) is wanted]
                        side.append({"seed": cells[0]["fold"], "rmse": mean(values)})
                yield {"of": "grid", "table": table, "arm": factor, "less": "without", **difference(*sides, "rmse")}


def _model(row: Mapping[str, Any]) -> str:
    """A cell of the grid, a model of scikit-learn, a protocol, or a kernel."""
    if "masked" in row:
        return f"{'transductive' if row['transductive'] else 'inductive'}, {'masked' if row['masked'] else 'shown'}"
    if "model" in row:
        return str(row["model"])
    return str(row["protocol"] if row["kernel"] == "general" and row["part_of"] == "npt" else row["kernel"])
