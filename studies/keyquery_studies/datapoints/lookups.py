"""Look-up: can cross-row attention find the duplicate of a row and read its target, if nothing else predicts it?

Targets are independent of features. Every row of a table occurs twice, and its target is shown once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.training import Recipe, train
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import result_name

# Whether some features are noise in both copies, and whether shown targets are 1 too high.
VARIANTS = {"plain": (False, False), "random": (True, False), "add one": (False, True), "both": (True, True)}
# RMSE on Protein, whose targets have a standard deviation of 6.11: of the network, and of the nearest neighbour.
PUBLISHED = {"plain": (0.34, 0.0), "random": (0.24, 7.19), "add one": (0.46, 6.11), "both": (0.75, 7.80)}
DEVIATION = 6.11
ROWS, FEATURES, NOISE = 16, 6, 3  # rows of a table, before they are doubled; features, and how many may be noise
EMBEDDING, DEPTH, HEADS, TABLES, TESTED = 16, 4, 4, 16, 64


def doubled(variant: str, tables: int, generator: torch.Generator) -> tuple[Rows, Float[Tensor, "tables n"]]:
    """Fresh tables: n rows with their targets, then the same without; and what those targets are."""
    check_choice("variant", variant, tuple(VARIANTS))
    random, raised = VARIANTS[variant]
    x, y = (torch.randn(tables, ROWS, count, generator=generator) for count in (FEATURES, 1))
    shown, asked = torch.cat((x, y + raised), 2), torch.cat((x, y), 2)
    values = torch.cat((shown, asked), 1)
    if random:  # no two rows are alike in these any more
        values[..., FEATURES - NOISE : FEATURES] = 1 + torch.randn(tables, 2 * ROWS, NOISE, generator=generator)
    hidden = torch.zeros(values.shape, dtype=torch.bool)
    hidden[:, ROWS:, -1] = True
    return Rows(values, torch.zeros(values.shape, dtype=torch.long), hidden), y.squeeze(-1)


def nearest(rows: Rows) -> Float[Tensor, "tables n"]:
    """The shown target of the row whose features are nearest."""
    x, n = rows.values[..., :-1], rows.values.shape[1] // 2
    neighbour = torch.cdist(x[:, n:], x[:, :n]).argmin(-1)
    return rows.values[:, :n, -1].gather(1, neighbour)


def scored(predicted: Float[Tensor, "tables n"], truth: Float[Tensor, "tables n"]) -> dict[str, float]:
    """Correlation, and the RMSE in standard deviations of the target."""
    pair = torch.stack((predicted.flatten(), truth.flatten())).double()
    return {"r": torch.corrcoef(pair)[0, 1].item(), "rmse": (pair[0] - pair[1]).square().mean().sqrt().item()}


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """One network learns one variant on fresh tables; without attention between rows it can learn nothing."""

    variant: str
    rows: str = "full"
    steps: int = 1000
    seed: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, tuple(VARIANTS))
        check_choice("rows", self.rows, ("full", "none"))
        check_count("steps", self.steps)

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name(("lookup", self.variant, self.rows, self.seed), self._settings())

    def _settings(self) -> dict[str, Any]:
        design = [ROWS, FEATURES, NOISE, EMBEDDING, DEPTH, HEADS, TABLES, TESTED]
        return {**{key: value for key, value in asdict(self).items() if key != "deadline"}, "design": design}

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, and predict the targets of unseen tables."""
        if self.deadline is not None and time() >= self.deadline:
            return {**self._settings(), "partial": True}
        torch.manual_seed(self.seed)
        network = TableNetwork((0,) * (FEATURES + 1), EMBEDDING, DEPTH, HEADS, rows=self.rows).to(device)
        options: dict[str, Any] = {"schedule": "flat+cosine", "weight_decay": 0.0, "bf16": False}
        recipe = Recipe(self.steps, lr=1e-3, warmup=min(100, self.steps // 4), seed=self.seed, **options)

        def draw(step: int, generator: torch.Generator) -> tuple[Rows, Tensor]:
            rows, truth = doubled(self.variant, TABLES, generator)
            return rows.to(device), truth.to(device)

        def loss(model: nn.Module, batch: tuple[Rows, Tensor]) -> Tensor:
            return (_asked(model, batch[0]) - batch[1]).square().mean()  # type: ignore[arg-type]

        before = perf_counter()
        train(network, draw, loss, recipe)
        rows, truth = doubled(self.variant, TESTED, torch.Generator().manual_seed(10**6))
        with torch.no_grad():
            predicted = _asked(network, rows.to(device)).cpu()
        return {
            **self._settings(),
            **scored(predicted, truth),
            "nearest": scored(nearest(rows), truth),
            "seconds": perf_counter() - before,
            "device": device_name(device),
        }


def _asked(network: TableNetwork, rows: Rows) -> Float[Tensor, "tables n"]:
    """Predictions for the targets of the second copies."""
    return network.target(network(*rows))[:, rows.hidden.shape[1] // 2 :, 0]
