"""Study `mask`: what the objective, the attention mask and the position encoding each do to the heads.

A masked model sees both sides, a next-token model only earlier tokens: a comparison of the two changes two factors. The
third arm changes one at a time: masked tokens, predicted from earlier ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from keyquery.pages.colours import LIGHT
from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.language_models import Training, prepare
from keyquery_studies.common.objectives import CAUSAL, SHARES
from keyquery_studies.common.rates import tuned
from keyquery_studies.common.rows import grouped, over_seeds, selected
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, option

ARMS = tuple(CAUSAL)
METRICS = ("symmetry", *SHARES)
FACTORS = {"mask": ("masked", "masked causal"), "objective": ("masked causal", "next token")}  # one changes per pair


@dataclass(frozen=True, kw_only=True)
class Masks(StudyReading, kind="mask study"):
    """Heads of trained models by objective, attention mask and position encoding."""

    models: Sequence[Mapping[str, Any]]  # one per model, with its heads
    rates: Sequence[Mapping[str, Any]]  # one per rate that was tried, without heads

    def records(self) -> list[dict[str, Any]]:
        """One row per head, window length and model."""
        keys = ("objective", "rope", "seed", "lr", "loss")
        return [{**{key: model[key] for key in keys}, **head} for model in self.models for head in model["heads"]]

    def layers(self) -> list[dict[str, Any]]:
        """Symmetry and shares of every layer: the mean over its heads, then mean and sd over seeds."""
        return over_seeds(self._layers(), ("rope", "window", "layer", "objective"), METRICS)

    def summary(self) -> list[dict[str, Any]]:
        """What each factor changes: differences of shares between two arms, over all layers, paired by seed.

        `p` is adjusted by Holm for all rows.
        """
        means = over_heads(self._layers(), ("rope", "window", "objective", "seed"))
        rows = []
        settings = dict.fromkeys((row["rope"], row["window"]) for row in means)
        for (rope, window), (factor, pair), name in product(
            settings, FACTORS.items(), ("position", "symmetric", "skew")
        ):
            arms = [selected(means, rope=rope, window=window, objective=objective) for objective in pair]
            place = {"rope": rope, "window": window, "factor": factor, "part": name}
            rows.append({**place, **difference(arms[1], arms[0], name)})
        tested = [row for row in rows if row["p"] is not None]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p"] = p
        return rows

    def _layers(self) -> list[dict[str, Any]]:
        return over_heads(self.records(), ("rope", "window", "layer", "objective", "seed"))


def over_heads(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Means of symmetry and shares over all rows that have the same keys."""
    return [
        {**dict(zip(keys, key, strict=True)), **{name: mean(row[name] for row in alike) for name in METRICS}}
        for key, alike in grouped(rows, keys).items()
    ]


def shares(reading: Masks, pyplot: Any) -> Any:
    """Stacked shares by layer in the longest window: a row per position encoding, a column per arm."""
    rows = reading.layers()
    longest = max(row["window"] for row in rows)
    figure, axes = pyplot.subplots(2, len(ARMS), figsize=(7.2, 3.6), sharex=True, sharey=True, layout="constrained")
    for axis, (rope, objective) in zip(axes.flat, ((r, o) for r in (False, True) for o in ARMS), strict=True):
        layers = [r for r in rows if (r["window"], r["rope"], r["objective"]) == (longest, rope, objective)]
        left = [0.0] * len(layers)
        for part, colour in LIGHT.items():
            widths = [max(row[part], 0.0) for row in layers]
            axis.barh([row["layer"] for row in layers], widths, left=left, color=colour, label=part, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.set(title=f"{objective}, {'RoPE' if rope else 'learned'}", xlim=(0, 1.05))
        axis.set_yticks([row["layer"] for row in layers], [f"layer {row['layer']}" for row in layers])
        axis.invert_yaxis() if axis is axes.flat[0] else None
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"share of the variance of scores in windows of {longest} tokens, mean over heads and seeds", fontsize=8
    )
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


FIGURES = {"shares": shares}


@dataclass(frozen=True, kw_only=True)
class Mask(Study):
    """Is it the objective or the attention mask? Compare masked, masked causal and next-token models.

    With learned positions and with RoPE; every arm has its own learning rate. Four minutes on a large GPU with 16
    --workers.
    """

    result = Masks

    corpus: Path | None = option(None, "A text file, or a .tsv with a column `text`. Default: the tokens in --out.")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "A seed.", "seed")
    rates: tuple[float, ...] = option((1e-3, 2e-3, 4e-3, 8e-3), "A learning rate of the first grid.", "rate")
    windows: tuple[int, ...] = option((32, 64, 128), "Window length at which heads are measured.", "window")
    steps: int = option(2500, "Training steps per model.", least=1)
    width: int = option(96, "Width of the models.", least=8)
    depth: int = option(3, "Number of layers.", least=1)
    length: int = option(128, "Tokens per window.", least=2)
    batch: int = option(64, "Windows per step.", least=1)
    vocabulary: int = option(2048, "Vocabulary size of the trained tokenizer.", least=260)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """The tokens of the corpus, which all trainings share."""
        if not 0 < min(self.windows) <= max(self.windows) <= self.length:
            raise ValueError(f"windows must be from 1 to {self.length} tokens long, got {self.windows}")
        return {"corpus": prepare(self.corpus, folder, self.vocabulary, force)}

    def arms(self, text: str) -> list[Training]:
        """Every arm with learned positions and with RoPE, with the first seed, on the text of a digest."""
        names = ("steps", "width", "depth", "length", "batch", "vocabulary", "windows")
        common = {name: getattr(self, name) for name in names}
        common |= {"kernel": "general", "seed": self.seeds[0], "text": text}
        return [Training(objective=objective, rope=rope, **common) for objective, rope in product(ARMS, (False, True))]

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """Every arm at all rates with the first seed, then at its best rate with every seed."""
        tried: dict[str, dict[str, Any]] = {}

        def run(jobs: Sequence[Training]) -> list[dict[str, Any]]:
            rows = train(jobs)
            tried.update({job.name: row for job, row in zip(jobs, rows, strict=True)})
            return rows

        best = tuned(self.arms(facts["corpus"]["digest"]), self.rates, run)
        models = run([replace(arm, seed=seed) for seed in self.seeds for arm in best])
        columns = ("objective", "rope", "lr", "seed", "validation")
        return {"models": models, "rates": [{name: row[name] for name in columns} for row in tried.values()]}
