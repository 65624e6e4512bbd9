"""Arms of the study `kernels` in small language models, trained side by side for many steps, each at its best rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from keyquery.support.checks import check_choice
from keyquery_studies.common.comparisons import difference
from keyquery_studies.common.store import result_name
from keyquery_studies.kernels.arms import ARMS
from keyquery_studies.kernels.differences import language
from keyquery_studies.starts.model import KERNELS, Scores, StartRun
from keyquery_studies.starts.training import trained

POSITIONS = ("learned", "RoPE")
SETTING = ("objective", "rope", "kernel", "init", "steps")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class KernelRun(StartRun):
    """One model, with any kernel of an arm."""

    kernel: str = "general"
    rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kernel", self.kernel, KERNELS)

    @property
    def name(self) -> str:
        """The name of its result file."""
        marks = ["rope"] if self.rope else []
        words = (self.objective, self.kernel, *marks, self.start, self.lr, self.seed)
        return result_name(words, asdict(self))

    @property
    def scores(self) -> Scores:
        """What it scores by."""
        return Scores(self.kernel, self.rope)


def arms(
    text: str,
    objectives: Sequence[str],
    positions: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    sizes: Mapping[str, Any],
) -> list[list[KernelRun]]:
    """All arms at all rates with all seeds; those with the same weights, which are trained side by side, together."""
    groups = []
    for objective, place, kernel in product(objectives, positions, KERNELS):
        inits = [init for own, init in ARMS.values() if own == kernel]
        fixed = {**sizes, "objective": objective, "kernel": kernel, "rope": place == "RoPE", "text": text}
        choices = product(inits, rates, seeds)
        groups.append([KernelRun(start=init, lr=rate, seed=seed, **fixed) for init, rate, seed in choices])
    return groups


def rows_of(groups: Sequence[Sequence[KernelRun]], steps: int, folder: Path, device: str) -> list[dict[str, Any]]:
    """The rows of all groups after half of the steps, and after all."""
    rows = [row for runs in groups for row in trained(runs, (steps // 2, steps), folder, device, lambda: False)]
    return [{**row, "init": row["start"], "share": 1.0} for row in rows]


def longer(rows: Rows) -> list[dict[str, Any]]:
    """Every arm after all steps, as `language` has it, at the rate that is best by validation over all seeds.

    `fell` is what the second half of the steps lowered the loss by.
    """
    table = []
    for row in language(_at_best([row for row in rows if row["steps"] == max(r["steps"] for r in rows)])):
        kernel, init = ARMS[row["arm"]]
        own = [r for r in rows if (r["objective"], r["rope"], r["kernel"], r["init"]) == (*_place(row), kernel, init)]
        ends = [_at_best([r for r in own if r["steps"] == steps]) for steps in sorted({r["steps"] for r in own})]
        tried = {r["lr"] for r in own}
        fell = difference(ends[0], ends[-1], "loss")["change"] if len(ends) > 1 else None
        kept = {key: value for key, value in row.items() if not key.startswith("longer") and key != "share"}
        table.append({**kept, "edge": row["lr"] in (min(tried), max(tried)), "steps": own[-1]["steps"], "fell": fell})
    return table


def _place(row: Mapping[str, Any]) -> tuple[str, bool]:
    return row["objective"], row["rope"]


def _at_best(rows: Rows) -> list[Mapping[str, Any]]:
    """Of every arm the rows at its best rate."""
    groups: dict[tuple[Any, ...], dict[float, list[Mapping[str, Any]]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in SETTING), {}).setdefault(row["lr"], []).append(row)
    best = [min(by_rate.values(), key=lambda own: mean(r["validation"] for r in own)) for by_rate in groups.values()]
    return [row for own in best for row in own]
