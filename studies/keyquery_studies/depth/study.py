"""Study `depth`: is there a best depth for a number of parameters, and does it grow with them?

The claim: at a given number of parameters there is one, and larger models are to be deeper, ln d = 5.039 + 0.0555·L.
Decoders of three budgets and many depths read the same novels; and what their heads become is read, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from time import time
from typing import Any

import numpy as np

from keyquery.learn.depth.law import Law
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery.support.statistics import student
from keyquery_studies.common.language_models import prepare
from keyquery_studies.common.objectives import SHARES
from keyquery_studies.common.rows import FORMER, firsts, over_seeds
from keyquery_studies.common.runner import run_jobs, study_folder
from keyquery_studies.depth.trial import ShapedTraining

NEAR = 2  # depths on either side of the best that a parabola is laid through
PLACE = ("budget", "layers")
MIX = (*SHARES, "pairwise_symmetric", "raw_symmetric")


@dataclass(frozen=True, kw_only=True)
class DepthStudy(Reading, kind="depth study"):
    """Loss per training for every depth and parameter count, and the score parts of the heads."""

    former = FORMER

    rows: Sequence[Mapping[str, Any]]  # one per training; `mix` has the means over heads of each layer
    diverged: Sequence[Mapping[str, Any]] = ()  # trainings that diverged: the learning rate was too high

    def records(self) -> list[dict[str, Any]]:
        """One row per training; curves and layers are in the JSON only."""
        return [{key: value for key, value in row.items() if key not in ("curve", "mix")} for row in self.rows]

    def chosen(self) -> list[dict[str, Any]]:
        """The trainings of every shape at its best learning rate on the validation split.

        `edge` marks a rate that is the lowest or the highest of those tried.
        """
        groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault((row["budget"], row["layers"]), []).append(row)
        best = []
        for place in sorted(groups):
            rate = best_rate(groups[place])
            tried = {row["rate"] for row in groups[place]}
            edge = len(tried) > 1 and rate in (min(tried), max(tried))
            alike = sorted((row for row in groups[place] if row["rate"] == rate), key=lambda row: row["seed"])
            best += [{**row, "edge": edge, **_mixed(row)} for row in alike]
        return best

    def summary(self) -> list[dict[str, Any]]:
        """One row per shape: test loss and score parts of its heads, mean and sd over seeds.

        `symmetric` to `interaction` are shares of the scores' variance on text, means over heads and layers;
        `pairwise_symmetric` is symmetric/(symmetric + skew), and `raw_symmetric` that of the weights' energy. Shares
        that a study of a former version has not are None.
        """
        return over_seeds(self.chosen(), (*PLACE, "width", "parameters", "rate", "edge"), ("loss", *MIX))

    def optima(self) -> list[dict[str, Any]]:
        """One row per parameter count: minimum of a parabola in ln L, with a 95 % interval, and the law's depth.

        The parabola goes through every seed of the best depth and of two on either side. `layers` is None where it has
        no lowest point between the least and the most layers: the best is then at an edge, or not told by so few.
        """
        rows, optima = self.chosen(), []
        for budget in sorted({row["budget"] for row in rows}):
            at = [row for row in rows if row["budget"] == budget]
            depths = sorted({row["layers"] for row in at})
            losses = [mean(row["loss"] for row in at if row["layers"] == layers) for layers in depths]
            best = losses.index(min(losses))
            near = depths[max(best - NEAR, 0) : best + NEAR + 1]
            used = [row for row in at if row["layers"] in near]
            fit = parabola([math.log(row["layers"]) for row in used], [row["loss"] for row in used])
            params = mean(row["parameters"] for row in at)
            optimum = {"budget": budget, "best": depths[best], "law": Law().layers(params), **_within(fit, depths)}
            optima.append({**optimum, "fit": None if fit is None else fit["curve"], "near": [near[0], near[-1]]})
        return optima

    def trends(self) -> list[dict[str, Any]]:
        """One row per budget: change of `pairwise_symmetric` and `raw_symmetric` as the depth grows by a factor of e.

        Slopes of a straight line in ln L, with 95 % intervals, through all depths and seeds.
        """
        rows, trends = self.chosen(), []
        for budget in sorted({row["budget"] for row in rows}):
            at = [row for row in rows if row["budget"] == budget]
            row: dict[str, Any] = {"budget": budget, "trainings": len(at)}
            for name in ("pairwise_symmetric", "raw_symmetric"):
                row[name] = _slope(
                    [math.log(training["layers"]) for training in at], [training[name] for training in at]
                )
            trends.append(row)
        return trends

    @classmethod
    def joined(cls, *parts: DepthStudy) -> DepthStudy:
        """One reading of separate runs."""
        rows = firsts((row for part in parts for row in part.rows), (*PLACE, "rate", "seed", "steps", "text"))
        lost = firsts((row for part in parts for row in part.diverged), (*PLACE, "rate", "seed", "steps", "text"))
        return cls(rows=rows, diverged=lost, provenance={"runs": [part.provenance for part in parts]})


def best_rate(rows: Sequence[Mapping[str, Any]]) -> float:
    """The learning rate with the lowest validation loss, of the seed with the most rates."""
    rates: dict[int, dict[float, float]] = {}
    for row in rows:
        rates.setdefault(row["seed"], {})[row["rate"]] = row["validation"]
    most = max(rates.values(), key=len)
    return min(most, key=most.__getitem__)


def parabola(x: Sequence[float], y: Sequence[float]) -> dict[str, Any] | None:
    """Where a least-squares parabola is lowest, and the standard error of that; None where it opens downwards.

    With y = c₀ + c₁x + c₂x² the lowest point is −c₁/2c₂; its error is that of c₁ and c₂, to first order.
    """
    terms = np.vander(np.asarray(x, dtype=float), 3, increasing=True)
    free = len(x) - 3
    if len(set(x)) < 3 or free < 1:
        return None
    c, *_ = np.linalg.lstsq(terms, np.asarray(y, dtype=float), rcond=None)
    if c[2] <= 0:
        return None
    noise = float(np.square(terms @ c - np.asarray(y)).sum()) / free
    covariance = noise * np.linalg.inv(terms.T @ terms)
    slope = np.array([0.0, -1 / (2 * c[2]), c[1] / (2 * c[2] ** 2)])
    error = math.sqrt(max(slope @ covariance @ slope, 0.0))
    return {"lowest": float(-c[1] / (2 * c[2])), "error": error, "free": free, "curve": c.tolist()}


def _within(fit: Mapping[str, Any] | None, depths: Sequence[int]) -> dict[str, float | None]:
    """The depth of a parabola's lowest point, where that lies between the depths that were tried."""
    if fit is None or not math.log(depths[0]) <= fit["lowest"] <= math.log(depths[-1]):
        return {"layers": None, "low": None, "high": None}
    half = student(fit["free"]) * fit["error"]
    low, high = (math.exp(min(fit["lowest"] + sign * half, 30.0)) for sign in (-1, 1))
    return {"layers": math.exp(fit["lowest"]), "low": low, "high": high}


def _slope(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """The slope of a least-squares line, with its 95 % interval."""
    if len(x) < 3 or len(set(x)) < 2:
        return None
    at = np.asarray(x) - mean(x)
    slope = float(at @ np.asarray(y) / (at @ at))
    left = np.asarray(y) - mean(y) - slope * at
    half = student(len(x) - 2) * math.sqrt(float(left @ left) / (len(x) - 2) / float(at @ at))
    return {"change": slope, "low": slope - half, "high": slope + half}


def _mixed(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Means over the layers of a model."""
    mix = row["mix"]
    means = {name: mean(layer[name] for layer in mix) for name in SHARES if name in mix[0]}
    pairs = means["symmetric"] + means["skew"]
    means["pairwise_symmetric"] = means["symmetric"] / pairs if pairs else 0.5
    return {
        **dict.fromkeys(SHARES),
        **means,
        "raw_symmetric": mean((1 + layer["raw_symmetry"]) / 2 for layer in mix),
    }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained. The first seed tries every learning rate; the others take the best of their shape."""

    budgets: tuple[int, ...] = (330_000, 1_000_000, 4_000_000)
    depths: tuple[int, ...] = (1, 2, 3, 4, 6, 9, 14, 24)
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 1000
    vocabulary: int = 1024
    length: int = 128

    def __post_init__(self) -> None:
        for name in ("budgets", "depths", "rates", "seeds"):  # duplicates are dropped
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        self.first(text="")  # refuses what no training takes

    def first(self, **common: Any) -> list[ShapedTraining]:
        """Every rate of the first seed; the deepest, which take longest, first."""
        return [
            ShapedTraining(budget=budget, layers=layers, rate=rate, seed=self.seeds[0], **self._same(), **common)
            for layers, budget in self._shapes()
            for rate in self.rates
        ]

    def then(self, rows: Sequence[Mapping[str, Any]], **common: Any) -> list[ShapedTraining]:
        """The other seeds of every shape whose rates are all done, with the best of them."""
        trials = []
        for layers, budget in self._shapes():
            at = [row for row in rows if (row["budget"], row["layers"]) == (budget, layers) and not row.get("partial")]
            able = [row for row in at if not row.get("diverged")]
            if len(at) == len(self.rates) and able:
                same: dict[str, Any] = {"budget": budget, "layers": layers, "rate": best_rate(able), **self._same()}
                trials += [ShapedTraining(seed=seed, **same, **common) for seed in self.seeds[1:]]
        return trials

    def _shapes(self) -> list[tuple[int, int]]:
        return [(layers, budget) for layers in sorted(self.depths, reverse=True) for budget in self.budgets]

    def _same(self) -> dict[str, Any]:
        return {"steps": self.steps, "vocabulary": self.vocabulary, "length": self.length}


def run(
    data: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    minutes: float | None = None,
    compiled: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> DepthStudy:
    """Train according to the plan, and return the loss at every depth.

    `data` is a text file, compressed or not, or a folder with one. With `out`, its tokens, checkpoints and every result
    are kept there: finished trainings are not repeated, and interrupted ones, also by `minutes`, are resumed; without
    data the tokens in `out` are used. `workers` processes share the device. `compiled`: each block by torch.compile.

    Parameters
    ----------
    data
        A text file or a folder with one. Default: the tokens in `out`.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    plan
        What to train. Default: the whole study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    minutes
        Time limit; the study can be resumed. Default: none.
    compiled
        Each block by torch.compile. Default: no.
    force
        Replace tokens of another corpus in `out`. Default: no.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    DepthStudy
        A Reading.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"minutes must be at least 0, got {minutes}")
    if minutes is not None and out is None:
        raise ValueError("minutes needs out: interrupted trainings would be lost")
    if data is None and out is None:
        raise ValueError("data must be a text file, or a folder with one")
    until = None if minutes is None else time() + 60 * minutes
    chosen = pick_device(device)
    with study_folder(out) as folder:
        facts = prepare(None if data is None else text_in(Path(data)), folder, plan.vocabulary, force)
        common: dict[str, Any] = {"text": facts["digest"], "until": until, "compiled": compiled}
        first = run_jobs(plan.first(**common), folder, chosen, workers, progress)
        results = first + run_jobs(plan.then(first, **common), folder, chosen, workers, progress)
    rows = [row for row in results if "loss" in row]
    lost = [row for row in results if row.get("diverged")]
    planned = len(first) + len(plan.depths) * len(plan.budgets) * (len(plan.seeds) - 1)
    facts = {"corpus": facts, "plan": asdict(plan), "devices": sorted({row["device"] for row in rows})}
    missing = planned - len(rows) - len(lost)
    return DepthStudy(rows=rows, diverged=lost, provenance=provenance(**facts, missing=missing, workers=workers))


def text_in(path: Path) -> Path:
    """A text file, or the one of a folder: of several, the one that is named for books."""
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if ".txt" in file.suffixes)
    named = [file for file in files if "books" in file.name.lower()]
    if len(candidates := named or files) != 1:
        there = ", ".join(file.name for file in candidates) or "none"
        raise ValueError(f"data must hold one text file, such as books.txt.xz, and {path} holds {there}: name the file")
    return candidates[0]
