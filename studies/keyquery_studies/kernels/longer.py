"""Arms of the study `kernels` in small language models, trained side by side for many steps, each at its best rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from keyquery.support.checks import check_choice
from keyquery_studies.common.language_models import tasks
from keyquery_studies.common.objectives import Task
from keyquery_studies.common.store import result_name
from keyquery_studies.kernels.arms import ARMS
from keyquery_studies.kernels.differences import SETTING, language
from keyquery_studies.starts.model import KERNELS, Scores, StartRun
from keyquery_studies.starts.training import trained

POSITIONS = ("learned", "RoPE")
ARM = (*SETTING, "kernel", "init", "steps")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class KernelRun(StartRun):
    """One model of any arm."""

    kernel: str = "general"
    rope: bool = False
    share: float = 1.0  # of the text that is trained on

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kernel", self.kernel, KERNELS)

    @property
    def name(self) -> str:
        """The name of its result file."""
        marks = ["rope"] if self.rope else []
        words = (self.objective, self.kernel, *marks, self.start, self.share, self.lr, self.seed)
        return result_name(words, asdict(self))

    @property
    def scores(self) -> Scores:
        """What it scores by."""
        return Scores(self.kernel, self.rope)

    def tasks(self, folder: Path, device: str) -> tuple[Task, Task]:
        """Training and validation, and the test; `folder` has the tokens."""
        return tasks(folder, device, self.objective, self.length, self.share, self.batch)


@dataclass(frozen=True)
class Group:
    """Runs whose weights have the same shapes, trained side by side for half of the steps, and for all."""

    runs: tuple[KernelRun, ...]
    steps: int

    @property
    def name(self) -> str:
        """The name of the file that says it is done."""
        first = self.runs[0]
        words = ("group", first.objective, first.kernel, *(["rope"] if first.rope else []), first.share)
        return result_name(words, {"runs": [own.name for own in self.runs], "steps": self.steps})

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train all of them; every model has its own result file."""
        return {"models": len(self.rows(folder, device))}

    def rows(self, folder: Path, device: str) -> list[dict[str, Any]]:
        """Their rows, without curves; those in `folder` are not trained again."""
        rows = trained(self.runs, (self.steps // 2, self.steps), folder, device, lambda: False)
        return [{**{key: value for key, value in row.items() if key != "curve"}, "init": row["start"]} for row in rows]


def groups_of(
    text: str,
    settings: Sequence[tuple[str, str, float]],
    rates: Sequence[float],
    seeds: Sequence[int],
    sizes: Mapping[str, Any],
) -> list[Group]:
    """All arms at all rates with all seeds, for each objective, kind of positions, and share of the text."""
    groups = []
    for (objective, place, share), kernel in product(settings, KERNELS):
        inits = [init for own, init in ARMS.values() if own == kernel]
        fixed = {**sizes, "objective": objective, "kernel": kernel, "rope": place == "RoPE", "text": text}
        choices = product(inits, rates, seeds)
        runs = [KernelRun(start=init, lr=rate, seed=seed, share=share, **fixed) for init, rate, seed in choices]
        groups.append(Group(tuple(runs), sizes["steps"]))
    return groups


def longer(rows: Rows) -> list[dict[str, Any]]:
    """Every arm after all steps, as `language` has it, at the rate that is best by validation over all seeds.

    `fell` is what the second half of the steps lowered the loss by, `gap_half` the gap after the first half.
    """
    most = {place: max(row["steps"] for row in rows if _setting(row) == place) for place in map(_setting, rows)}
    first, last = ([r for r in rows if r["steps"] == most[_setting(r)] // part] for part in (2, 1))
    before = {(_setting(row), row["arm"]): row for row in language(_at_best(first))}
    table = []
    for row in language(_at_best(last)):
        half = before.get((_setting(row), row["arm"]))
        tried = {r["lr"] for r in last if (_setting(r), r["kernel"], r["init"]) == (_setting(row), *ARMS[row["arm"]])}
        kept = {key: value for key, value in row.items() if not key.startswith("longer")}
        kept |= {"edge": row["lr"] in (min(tried), max(tried)), "steps": most[_setting(row)]}
        fell = None if half is None else half["loss"] - row["loss"]
        table.append({**kept, "fell": fell, "gap_half": None if half is None else half["gap"]})
    return table


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in SETTING)


def _at_best(rows: Rows) -> list[Mapping[str, Any]]:
    """Of every arm the rows at its best rate."""
    groups: dict[tuple[Any, ...], dict[float, list[Mapping[str, Any]]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ARM), {}).setdefault(row["lr"], []).append(row)
    best = [min(by_rate.values(), key=lambda own: mean(r["validation"] for r in own)) for by_rate in groups.values()]
    return [row for own in best for row in own]
