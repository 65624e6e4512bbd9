"""Study `kernels`: does structure pay? Every kernel on two tasks of known truth, and in language models on real text.

The claims: at the start half the energy of a standard head is skew; where the task is symmetric, M = S ⪰ 0 does better,
the more so with less data; where it is skew, the skew part does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyquery.capture.load import pick_device
from keyquery.forms import Form
from keyquery.layers import Attention
from keyquery.layers.kernels import KERNELS
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress
from keyquery_studies.common.language_models import INITS, Training, first_below, prepare
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.common.rows import FORMER, over_seeds
from keyquery_studies.common.runner import Job, run_parts, study_folder
from keyquery_studies.kernels.synthetic import TASKS, Trial

PARTS = ("synthetic", "language", "init", "all")
READ = ("general", "symmetric", "psd", "skew", "split")  # the kernels that read text
VARIED = ("general", "symmetric", "split")  # those that are also tried with rotary positions and wide heads
SETTING = ("objective", "share", "steps", "rope", "wide", "kernel", "init")
STARTS = ((64, 4), (256, 4), (768, 12))  # widths and heads whose start is measured


@dataclass(frozen=True, kw_only=True)
class Kernels(Reading, kind="kernels"):
    """Results per training for every kernel."""

    former = FORMER

    starts: Sequence[Mapping[str, Any]]  # one per fresh layer and seed: the skew share of its heads' energy
    synthetic: Sequence[Mapping[str, Any]]  # one per task, kernel, sample size and seed
    language: Sequence[Mapping[str, Any]]  # one per language model

    def records(self) -> list[dict[str, Any]]:
        """One row per untrained layer and per training, named by its part; curves are in the JSON only."""
        parts = {"start": self.starts, "synthetic": self.synthetic, "language": self.language}
        return [
            {"part": part, **{key: value for key, value in row.items() if key != "curve"}}
            for part, rows in parts.items()
            for row in rows
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Mean and sd over seeds of every metric; the rows of one part have the same keys.

        Of language models, `gap` is the loss less that of the general kernel of the same seed, started as usual, with
        the same positions, and `faster` the share of steps saved in reaching the best validation loss of that one.
        """
        rows = [{"part": "start", **row} for row in over_seeds(self.starts, ("layer", "width"), ("skew",))]
        means = over_seeds(self.synthetic, ("task", "kernel", "samples"), ("error",))
        rows += [{"part": "synthetic", **row} for row in means]
        means = over_seeds(map(self._compared, self.language), SETTING, ("loss", "gap", "faster", "parameters"))
        return rows + [{"part": "language", **row} for row in means]

    def _compared(self, row: Mapping[str, Any]) -> dict[str, Any]:
        usual = {**row, "kernel": "general", "init": "default", "wide": False}
        keys = (*SETTING, "seed")
        base = next((r for r in self.language if all(r[key] == usual[key] for key in keys)), None)
        if base is None:
            return {**row, "gap": None, "faster": None}
        reached = first_below(row["curve"], min(loss for _, loss in base["curve"]))
        return {
            **row,
            "gap": row["loss"] - base["loss"],
            "faster": None if reached is None else 1 - reached / row["steps"],
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained. Seeds of language models and of the small tasks are apart: the latter cost next to nothing."""

    part: str = "all"
    seeds: tuple[int, ...] = (0, 1, 2)
    trial_seeds: tuple[int, ...] = tuple(range(10))
    samples: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    trial_steps: int = 1000
    steps: int = 800
    few_steps: int = 400
    few: float = 0.02
    vocabulary: int = 4096
    width: int = 256
    depth: int = 4
    length: int = 128

    def __post_init__(self) -> None:
        check_choice("part", self.part, PARTS)
        for name in ("trial_steps", "steps", "few_steps", "width", "depth", "length"):
            check_count(name, getattr(self, name), least=1)
        if not 0 < self.few <= 1:
            raise ValueError(f"few must be a share above 0 and at most 1, got {self.few}")

    def has(self, part: str) -> bool:
        """Whether a part is requested."""
        return self.part in (part, "all")

    def trials(self) -> list[Trial]:
        """Every kernel on both tasks of known truth."""
        if not self.has("synthetic"):
            return []
        return [
            Trial(task, kernel, samples, seed, self.trial_steps)
            for seed in self.trial_seeds
            for task in TASKS
            for kernel in KERNELS
            for samples in self.samples
        ]

    def trainings(self, text: str) -> list[Training]:
        """Language models, seed by seed, so that an interrupted study has complete comparisons."""
        sizes = {"width": self.width, "depth": self.depth, "length": self.length}
        common = {"text": text, "vocabulary": self.vocabulary, **sizes}
        return [
            Training(objective=objective, seed=seed, **{"steps": self.steps, **common, **chosen})
            for seed in self.seeds
            for chosen in self._settings()
            for objective in OBJECTIVES
        ]

    def _settings(self) -> list[dict[str, Any]]:
        settings: list[dict[str, Any]] = []
        if self.has("language"):
            settings += [{"kernel": kernel} for kernel in READ]
            settings += [{"kernel": kernel, "share": self.few, "steps": self.few_steps} for kernel in READ]
            settings += [{"kernel": kernel, "rope": True} for kernel in VARIED]
            settings += [{"kernel": k, "rope": rope, "wide": True} for k in VARIED[1:] for rope in (False, True)]
        if self.has("init"):
            others = INITS[1:] if settings else INITS  # the language part trains the usual start too
            settings += [{"kernel": "general", "init": init} for init in others]
        return settings


def run(
    corpus: str | Path | None = None,
    out: str | Path | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    workers: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> Kernels:
    """Train according to the plan, and return the results of every kernel.

    `corpus` is a text file, or a .tsv file with a column `text`, compressed or not; the synthetic part needs none. With
    `out`, the corpus's tokens and every result are kept there: finished trainings are not repeated, a study may
    be interrupted and resumed, and later runs may add seeds. Without a corpus the tokens in `out` are used.
    `workers` processes share the device.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    chosen = pick_device(device)
    if plan.part != "synthetic" and corpus is None and out is None:
        raise ValueError(f"corpus must be a text file for part {plan.part!r}; only 'synthetic' needs none")
    with study_folder(out) as folder:
        facts = None if plan.part == "synthetic" else prepare(corpus, folder, plan.vocabulary, force)
        jobs: dict[str, Sequence[Job]] = {
            "language": plan.trainings(facts["digest"]) if facts else [],
            "synthetic": plan.trials(),
        }
        rows = run_parts(jobs, folder, chosen, workers, progress)
    return Kernels(
        starts=starts(plan.trial_seeds) if plan.has("synthetic") else [],
        **rows,
        provenance=provenance(
            corpus=facts, plan=asdict(plan), devices=sorted({row["device"] for row in rows["language"]})
        ),
    )


def starts(seeds: Iterable[int]) -> list[dict[str, Any]]:
    """The skew share of fresh heads' energy, ½(1 − symmetry) = ‖A‖²/‖M‖²; of iid weights ½(1 − 1/d) is expected.

    >>> round(starts([0])[-1]["skew"], 2)
    0.5
    """
    rows = []
    for width, heads in STARTS:
        for seed in seeds:
            torch.manual_seed(seed)
            query, key, _ = nn.MultiheadAttention(width, heads).in_proj_weight.unflatten(0, (3, heads, -1))
            forms = {"keyquery": Attention(width, heads).form(), "torch": Form(query, key)}
            rows += [
                {"layer": layer, "width": width, "seed": seed, "skew": (1 - form.symmetry).mean().item() / 2}
                for layer, form in forms.items()
            ]
    return rows
