"""Study `primal`: Primal-Attention compared with softmax, on time series and on long texts.

The claims: it matches or exceeds the accuracy of softmax (Primal.+, where only the last layer is primal, more so), and
a step is faster. Timings, ablations and the other tasks of the arena, whose rows the published reading holds, were run
at commit 7792c819.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from keyquery.support.checks import check_choice
from keyquery_studies.common.comparisons import corrected, difference
from keyquery_studies.common.rates import tuned
from keyquery_studies.common.rows import over_seeds
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, option
from keyquery_studies.primal.series import ATTENTIONS, PROTOCOLS, SeriesTrial, prepare_series, published_settings
from keyquery_studies.primal.text import TextRun, grouped_runs, prepare_texts

SERIES = ("dataset", "attention", "protocol", "width", "rank", "eta", "epochs")
TEXT = ("attention", "lr", "length", "steps", "batch")
SIDES = ("general", "primal", "released")  # what is compared on texts
SAMPLINGS = ("primal, sampling padding", "released, sampling real tokens")  # one factor changed; on demand
RATES = (1e-4, 3e-4, 1e-3)  # the published rate, and higher ones for fewer steps


@dataclass(frozen=True, kw_only=True)
class PrimalStudy(StudyReading, kind="primal study"):
    """Results per training for primal attention and softmax."""

    series: Sequence[Mapping[str, Any]] = ()  # one per training on a time-series dataset
    text: Sequence[Mapping[str, Any]] = ()  # one per training on texts, beside the released layer
    ablation: Sequence[Mapping[str, Any]] = ()  # on time series, with one component of primal attention ablated
    arena: Sequence[Mapping[str, Any]] = ()  # one per training on a task of the arena
    speed: Sequence[Mapping[str, Any]] = ()  # one per task, each with `rows`, one per attention

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds of every accuracy, and the time per step."""
        means = over_seeds(self.series, SERIES, ("accuracy", "last_accuracy"))
        rows = [{"part": "series", **row} for row in means]
        rows += [{"part": "text", **row} for row in over_seeds(self.text, TEXT, ("accuracy",))]
        return rows + [{"part": "speed", "task": run["task"], **row} for run in self.speed for row in run["rows"]]

    def contrasts(self) -> list[dict[str, Any]]:
        """Accuracies paired by seed, p by Holm within a part: primal less softmax on series, and the arms of Text."""
        rows = []
        sets = dict.fromkeys(row["dataset"] for row in self.series)
        for name, protocol, attention in product(sets, PROTOCOLS, ATTENTIONS[:2]):
            one, other = (self._runs(name, arm, protocol) for arm in (attention, "general"))
            if one and other:
                of = {"part": "series", "dataset": name, "protocol": protocol, "attention": attention}
                rows.append({**of, "less": "general", **difference(one, other, "accuracy")})
        return [*corrected(rows), *corrected(self._texts())]

    def _texts(self) -> list[dict[str, Any]]:
        """The arms of Text, paired by seed, in every setting."""
        rows = []
        pairs = [("primal", "general"), ("released", "general"), ("primal", "released")]
        pairs += [(name, name.split(",")[0]) for name in SAMPLINGS]
        for length, (own, base) in product(sorted({row["length"] for row in self.text}), pairs):
            short = [row for row in self.text if row["length"] == length]
            one, other = (_most([row for row in short if row["attention"] == name]) for name in (own, base))
            if one and other:
                of = {"part": "text", "dataset": f"text, {length:,}", "protocol": "held out", "attention": own}
                rows.append({**of, "less": base, **difference(one, other, "accuracy")})
        return rows

    def protocols(self) -> list[dict[str, Any]]:
        """What the published protocol adds on each dataset, in accuracy: more training data, and epochs by test data.

        Differences of the last epoch's accuracy, and of the chosen epoch's to it; paired by seed, mean over attentions.
        """
        rows = []
        for name in dict.fromkeys(row["dataset"] for row in self.series):
            own = {protocol: self._mean(name, protocol) for protocol in PROTOCOLS}
            held, published = (own[protocol] for protocol in ("held out", "published"))
            if held and published:
                pairs = {"data": (published, held, "last"), "epoch": (published, published, "gain")}
                for factor, (one, other, key) in pairs.items():
                    other = [{**row, "gain": 0.0} for row in other] if key == "gain" else other
                    rows.append({"dataset": name, "factor": factor, **difference(one, other, key)})
        return corrected(rows)

    def _mean(self, dataset: str, protocol: str) -> list[dict[str, Any]]:
        """Per seed, the mean over attentions of the last accuracy, and of the gain by choosing the epoch."""
        runs = [row for row in self.series if (row["dataset"], row["protocol"]) == (dataset, protocol)]
        rows = []
        for seed in dict.fromkeys(row["seed"] for row in runs):
            own = [row for row in runs if row["seed"] == seed]
            gains = [row["accuracy"] - row["last_accuracy"] for row in own]
            rows.append({"seed": seed, "last": fmean(row["last_accuracy"] for row in own), "gain": fmean(gains)})
        return rows

    def _runs(self, dataset: str, attention: str, protocol: str) -> list[Mapping[str, Any]]:
        wanted = (dataset, attention, protocol)
        return [row for row in self.series if (row["dataset"], row["attention"], row["protocol"]) == wanted]


def _most(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the rate that most seeds were trained with."""
    groups = [[row for row in rows if row["lr"] == rate] for rate in dict.fromkeys(row["lr"] for row in rows)]
    return max(groups, key=len, default=[])


@dataclass(frozen=True, kw_only=True)
class Primal(Study):
    """What is Primal-Attention worth? Compare it with softmax on time series and on long texts.

    On texts softmax, our layer and a literal statement of the released one are trained side by side, each at its best
    rate. Minutes to hours on a GPU.
    """

    result = PrimalStudy

    data: Path | None = option(None, "A folder of .ts files, and for texts a .tsv with split, label and text.")
    part: str = option("all", "series, text or all.")
    datasets: tuple[str, ...] = option((), "A time-series dataset.", "dataset")
    attentions: tuple[str, ...] = option((), "primal, primal+, general; on texts primal, released, …", "attention")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "A seed.", "seed")
    epochs: int = option(100, "Epochs per training run on time series.", least=1)
    width: int = option(512, "Width of the networks for time series.", least=8)
    length: int = option(1024, "Bytes of a text, at most 4096.", least=1)
    steps: int = option(1200, "Training steps on texts.", least=1)
    batch: int = option(32, "Texts per step.", least=1)
    rates: tuple[float, ...] = option(RATES, "A learning rate on texts; a single one is not tuned.", "rate")

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Facts of the datasets and of the texts, whose arrays are cached in `folder`."""
        check_choice("part", self.part, ("series", "text", "all"))
        facts: dict[str, Any] = {}
        if self.part != "text":
            facts["sets"] = prepare_series(self.data, folder, self.datasets)
        if self.part != "series":
            files = (
                [] if self.data is None else [file for file in sorted(self.data.iterdir()) if ".tsv" in file.suffixes]
            )
            if len(files) > 1:
                raise ValueError(f"data must hold one .tsv file, got {', '.join(file.name for file in files)}")
            facts["texts"] = prepare_texts(files[0] if files else None, folder)
        return facts

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """Every attention under both protocols, by seed; every arm of the texts at its best rate."""
        sizes: dict[str, Any] = {"width": self.width, "epochs": self.epochs}
        trials = [
            SeriesTrial(
                dataset=of["dataset"],
                digest=of["digest"],
                attention=attention,
                protocol=protocol,
                seed=seed,
                **sizes,
                **published_settings(of["dataset"], attention, self.width),
            )
            for seed in self.seeds
            for of in facts.get("sets", ())
            for attention in self.attentions or ATTENTIONS
            for protocol in PROTOCOLS
        ]
        return {"series": train(trials), "text": self._texts(facts["texts"], train) if "texts" in facts else []}

    def _texts(self, facts: Mapping[str, Any], train: Train) -> list[dict[str, Any]]:
        """Every arm at all rates with the first seed, then at its best rate with all seeds."""
        rows: dict[TextRun, dict[str, Any]] = {}

        def run(runs: Sequence[TextRun]) -> list[dict[str, Any]]:
            groups = grouped_runs([run for run in runs if run not in rows])
            for group, trained in zip(groups, train(groups), strict=True):
                members = (replace(group.run_of, lr=rate, seed=seed) for rate, seed in group.runs)
                rows.update(zip(members, trained["rows"], strict=True))
            return [rows[run] for run in runs]

        sizes: dict[str, Any] = {"length": self.length, "steps": self.steps, "batch": self.batch}
        arms = [
            TextRun(attention=name, seed=self.seeds[0], data=facts["digest"], lr=self.rates[0], **sizes)
            for name in self.attentions or SIDES
        ]
        best = arms if len(self.rates) == 1 else tuned(arms, self.rates, run)
        run([replace(arm, seed=seed) for arm in best for seed in self.seeds])
        return list(rows.values())
