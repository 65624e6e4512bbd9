"""Study `kernels`: does structure pay? Every kernel on two tasks of known truth, and in language models on real text.

The claims: at the start half the energy of a standard head is skew; where the task is symmetric, M = S ⪰ 0 does better,
the more so with less data; where it is skew, the skew part does the work; a symmetric start makes training faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyquery.forms import Form
from keyquery.layers import Attention
from keyquery.layers.kernels import KERNELS
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress
from keyquery_studies.common.language_models import Sizes, prepare
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.common.rows import FORMER, over_seeds
from keyquery_studies.common.runner import Job, run_jobs, study_folder
from keyquery_studies.kernels.arms import Comparison
from keyquery_studies.kernels.differences import initialisations, language
from keyquery_studies.kernels.longer import POSITIONS, Group, groups_of, longer
from keyquery_studies.kernels.synthetic import TASKS, Trial

PARTS = ("synthetic", "language", "init", "longer", "all")  # all: without longer
STARTS = ((64, 4), (256, 4), (768, 12))  # widths and heads whose start is measured


@dataclass(frozen=True, kw_only=True)
class Kernels(Reading, kind="kernels"):
    """Results per training for every kernel."""

    former = FORMER

    starts: Sequence[Mapping[str, Any]]  # one per fresh layer and seed: the skew share of its heads' energy
    synthetic: Sequence[Mapping[str, Any]]  # one per task, kernel, sample size and seed
    language: Sequence[Mapping[str, Any]]  # one per language model
    longer: Sequence[Mapping[str, Any]] = ()  # one per small language model and number of steps

    @classmethod
    def joined(cls, *parts: Kernels) -> Kernels:
        """One reading of separate runs; its plan is that of the first."""
        names = ("starts", "synthetic", "language", "longer")
        rows = {name: [row for part in parts for row in getattr(part, name)] for name in names}
        runs = [part.provenance for part in parts]
        return cls(**rows, provenance={**parts[0].provenance, "longer": runs[1:]})

    def records(self) -> list[dict[str, Any]]:
        """One row per untrained layer and per training, named by its part; curves are in the JSON only."""
        parts = {"start": self.starts, "synthetic": self.synthetic, "language": self.language, "longer": self.longer}
        return [
            {"part": part, **{key: value for key, value in row.items() if key != "curve"}}
            for part, rows in parts.items()
            for row in rows
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Means over seeds, and of language models paired differences; the rows of one part have the same keys.

        See `keyquery_studies.kernels.differences` for the columns of the parts `language` and `init`.
        """
        rows = [{"part": "start", **row} for row in over_seeds(self.starts, ("layer", "width"), ("skew",))]
        means = over_seeds(self.synthetic, ("task", "kernel", "samples"), ("error",))
        rows += [{"part": "synthetic", **row} for row in means]
        rows += [{"part": "longer", **row} for row in longer(self.longer)]
        if any("lr" not in row for row in self.language):
            raise ValueError("these language models are of an earlier version of the study: run it again")
        parts = self.provenance.get("plan", {}).get("part", "all")
        if parts in ("language", "all"):
            rows += [{"part": "language", **row} for row in language(self.language)]
        if parts in ("init", "all"):
            rows += [{"part": "init", **row} for row in initialisations(self.language)]
        return rows


@dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """What is trained; the command's default sizes of the part longer are smaller.

    Seeds of language models and of the small tasks are apart: the latter cost next to nothing.
    """

    part: str = "all"
    few: float = 0.02
    doubled: int = 2
    trial_seeds: tuple[int, ...] = tuple(range(10))
    samples: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    trial_steps: int = 1000
    objectives: tuple[str, ...] = OBJECTIVES  # of the part longer
    positions: tuple[str, ...] = POSITIONS  # of the part longer
    shares: tuple[float, ...] = (1.0,)  # of the text, in the part longer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("part", self.part, PARTS)
        for name, values, known in (
            ("objective", self.objectives, OBJECTIVES),
            ("positions", self.positions, POSITIONS),
        ):
            for value in values:
                check_choice(name, value, known)
        check_count("trial_steps", self.trial_steps)
        check_count("doubled", self.doubled, least=0)
        for name, share in (("few", self.few), *(("share", share) for share in self.shares)):
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be a share above 0 and at most 1, got {share}")

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

    def comparison(self, text: str) -> Comparison:
        """The language models, on the text of a digest."""
        parts = [part for part in ("language", "init") if self.has(part)]
        options: dict[str, Any] = {"seeds": self.seeds, "rates": self.rates, "few": self.few, "doubled": self.doubled}
        return Comparison(text=text, sizes=self.sizes(), parts=parts, **options)

    def groups(self, text: str) -> list[Group]:
        """The models of the part longer, on the text of a digest."""
        settings = list(product(self.objectives, self.positions, self.shares))
        return groups_of(text, settings, self.rates, self.seeds, self.sizes())


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

    Parameters
    ----------
    corpus
        A text file, or a .tsv file with a column `text`. Default: the tokens in `out`.
    out
        A folder for results: finished trainings are not repeated. Default: none.
    plan
        What to train. Default: the whole study.
    device
        Where to train. Default: "auto", a GPU if there is one.
    workers
        Processes that share the device. Default: 1.
    force
        Replace tokens of another corpus in `out`. Default: no.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Kernels
        A Reading.
    """
    plan = plan or Plan()
    check_count("workers", workers)
    chosen = pick_device(device)
    if plan.part != "synthetic" and corpus is None and out is None:
        raise ValueError(f"corpus must be a text file for part {plan.part!r}; only 'synthetic' needs none")
    with study_folder(out) as folder:
        facts = None if plan.part == "synthetic" else prepare(corpus, folder, plan.vocabulary, force)

        def train(jobs: Sequence[Job]) -> list[dict[str, Any]]:
            return run_jobs(jobs, folder, chosen, workers, progress)

        trained = plan.comparison(facts["digest"]).rows(train) if facts and plan.part != "longer" else []
        groups = plan.groups(facts["digest"]) if facts and plan.part == "longer" else []
        train(groups)
        side_by_side = [row for group in groups for row in group.rows(folder, chosen)]
        synthetic = train(plan.trials())
    return Kernels(
        starts=starts(plan.trial_seeds) if plan.has("synthetic") else [],
        synthetic=synthetic,
        language=trained,
        longer=side_by_side,
        provenance=provenance(
            corpus=facts, plan=asdict(plan), devices=sorted({row["device"] for row in (*trained, *side_by_side)})
        ),
    )


def starts(seeds: Iterable[int]) -> list[dict[str, Any]]:
    """The skew share of fresh heads' energy, ½(1 − symmetry) = ‖A‖²/‖M‖²; of iid weights ½(1 − 1/d) is expected."""
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
