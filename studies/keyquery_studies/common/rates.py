"""A learning rate for every arm of a comparison: the best of a grid, extended until the best is not at its edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

EXTENSIONS = 3  # times a grid may grow


@runtime_checkable
class Tunable(Protocol):
    """A frozen dataclass with a learning rate."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def lr(self) -> float:
        """The learning rate."""


Arm = TypeVar("Arm", bound=Tunable)
Run = Callable[[Sequence[Arm]], list[dict[str, Any]]]


def tuned(arms: Iterable[Arm], rates: Sequence[float], run: Run[Arm]) -> list[Arm]:
    """Every arm with the rate of its lowest validation loss; all rates of all arms are trained together.

    `rates` is the first grid. An arm whose best rate is at an edge is also trained with half or twice that rate, at
    most three times.
    """
    grids = {arm: sorted(rates) for arm in arms}
    best: dict[Arm, float] = {}
    for _ in range(EXTENSIONS + 1):
        trainings = [replace(arm, lr=rate) for arm, grid in grids.items() for rate in grid]
        losses = dict(zip(trainings, (_loss(row) for row in run(trainings)), strict=True))
        best = {arm: min(grid, key=lambda rate: losses[replace(arm, lr=rate)]) for arm, grid in grids.items()}
        missing = {arm: rate for arm, grid in grids.items() if (rate := _beyond(grid, best[arm])) is not None}
        for arm, rate in missing.items():
            grids[arm] = sorted([*grids[arm], rate])
        if not missing:
            break
    return [replace(arm, lr=rate) for arm, rate in best.items()]


def _loss(row: dict[str, Any]) -> float:
    """The validation loss of a row; a training that diverged has none."""
    return math.inf if row["validation"] is None else float(row["validation"])


def _beyond(grid: Sequence[float], rate: float) -> float | None:
    """The next rate beyond the edge of a grid, or None if `rate` is inside it."""
    if rate == grid[0]:
        return float(f"{rate / 2:.3g}")
    return float(f"{rate * 2:.3g}") if rate == grid[-1] else None
