"""Language models of the study `kernels`: arms that differ in one factor, each at its own learning rate.

The control of every structured kernel is an unconstrained one that starts symmetric, Wq = Wk, with ‖M‖ of every head as
by default: what that one gains is due to the start, not to the constraint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from keyquery_studies.common.language_models import INITS, Training
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.common.rates import Run, tuned

ARMS = {  # kernel and initialisation
    "unconstrained": ("general", "default"),
    "symmetric init": ("general", "matched"),
    "symmetric": ("symmetric", "default"),
    "split": ("split", "default"),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The trainings of the language models.

    Every arm × position encoding × objective × share of the text, and every start of the unconstrained kernel: at all
    rates with the first seed, then at the best rate with all seeds. Two controls: arms on the full text also train for
    twice as many steps, with the first `doubled` seeds; starts also train at half and at twice their best rate.
    """

    text: str  # the digest of the corpus
    sizes: Mapping[str, Any]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    few: float
    doubled: int
    parts: Sequence[str] = ("language", "init")

    def rows(self, run: Run[Training]) -> list[dict[str, Any]]:
        """Train everything by `run`, which takes trainings and returns their rows."""
        arms, starts = self._arms(), self._starts()
        rows: dict[Training, dict[str, Any]] = {}

        def recorded(trainings: Sequence[Training]) -> list[dict[str, Any]]:
            rows.update(zip(trainings, results := run(trainings), strict=True))
            return results

        more: list[Training] = []
        order = list(dict.fromkeys([*arms, *starts]))
        for training, best in zip(order, tuned(order, self.rates, recorded), strict=True):
            rates = (best.lr / 2, best.lr, best.lr * 2) if training in starts else (best.lr,)
            more += [replace(best, seed=seed, lr=float(f"{rate:.3g}")) for seed in self.seeds for rate in rates]
            if training in arms and training.share == 1:
                longer = replace(best, steps=2 * best.steps)
                more += [replace(longer, seed=seed) for seed in self.seeds[: self.doubled]]
        recorded(sorted(dict.fromkeys(more), key=lambda training: (training.steps, training.seed)))
        return list(rows.values())

    def _arms(self) -> list[Training]:
        if "language" not in self.parts:
            return []
        settings = product(OBJECTIVES, (1.0, self.few), (False, True), ARMS.values())
        return [self._training(objective, share, rope, *arm) for objective, share, rope, arm in settings]

    def _starts(self) -> list[Training]:
        if "init" not in self.parts:
            return []
        return [self._training(objective, 1.0, False, "general", init) for objective in OBJECTIVES for init in INITS]

    def _training(self, objective: str, share: float, rope: bool, kernel: str, init: str) -> Training:
        varied: dict[str, Any] = {"objective": objective, "share": share, "rope": rope, "kernel": kernel, "init": init}
        return Training(seed=self.seeds[0], text=self.text, **varied, **self.sizes)
