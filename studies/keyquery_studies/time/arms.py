"""Four models that differ in where they see time: nowhere, as an input, in the attention scores, or in both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

from keyquery.learn.events.model import EventModel
from keyquery.learn.events.network import EventNetwork
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import array_file, result_name
from keyquery_studies.time.event_files import split

# Where an arm sees time: the gap before an event as an input, and Mercer's encoding in the scores.
ARMS = {"order": (False, False), "gap": (True, False), "kernel": (False, True), "both": (True, True)}
RATES = (1e-3, 4e-3, 1.6e-2)  # the first grid
SHAPE: dict[str, Any] = {"width": 32, "depth": 1, "heads": 2}


class ArmModel(EventModel):
    """An `EventModel` with the gap as an input or without, and MLPs widened to the parameters of the largest arm."""

    gap_input = True
    parameters = 0

    def _network(self, types: int, floor: float, **further: Any) -> EventNetwork:
        shape = (types, self.width, self.depth, self.heads, self.time)
        largest = _size(EventNetwork(*shape[:4], "mercer", dropout=self.dropout))
        bare = _size(EventNetwork(*shape, since=self.gap_input))
        per_unit = self.depth * (2 * self.width + 1)
        hidden = 4 * self.width + round((largest - bare) / per_unit)
        network = EventNetwork(
            *shape, dropout=self.dropout, since=self.gap_input, floor=floor, hidden=hidden, **further
        )
        self.parameters = _size(network)
        return network


def _size(network: EventNetwork) -> int:
    return sum(weight.numel() for weight in network.parameters())


@dataclass(frozen=True, kw_only=True)
class ArmTrial:
    """One arm, trained on four fifths of the groups until validation stops improving, tested on the others."""

    dataset: str
    digest: str
    arm: str
    seed: int
    lr: float = 2e-3
    window: int = 80
    gap_weight: float = 0.1  # the type is what is compared
    epochs: int = 25
    patience: int = 5
    batch: int = 128
    deadline: float | None = None  # Unix time after which it is not started; not part of the settings

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name((self.dataset, self.arm, self.lr, self.seed), self._settings())

    def _settings(self) -> dict[str, Any]:
        return {**{key: value for key, value in asdict(self).items() if key != "deadline"}, **SHAPE}

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train and evaluate."""
        if self.deadline is not None and time() >= self.deadline:
            return {**self._settings(), "partial": True, "validation": None}
        learned, test = split(folder / array_file(self.dataset, self.digest))
        gap_input, kernel = ARMS[self.arm]
        model = ArmModel(
            time="mercer" if kernel else "positions",
            **SHAPE,
            window=self.window,
            gap_weight=self.gap_weight,
            epochs=self.epochs,
            patience=self.patience,
            batch_size=self.batch,
            lr=self.lr,
            random_state=self.seed,
            device=device,
        )
        model.gap_input = gap_input
        start = perf_counter()
        model.fit(*learned[:3])
        seconds = perf_counter() - start
        evaluation = model.evaluate(*test[:3])
        evaluated, *counts = evaluation.rows
        losses = [row["validation"] for row in model.history_]
        return {
            **self._settings(),
            **{name: evaluated[name] for name in ("accuracy", "nll_type", "nll_gap")},
            "counts": [dict(row) for row in counts],
            "events": evaluation.events,
            "groups": evaluation.firsts,
            "validation": min(losses),
            "best_epoch": 1 + losses.index(min(losses)),
            "epochs_run": len(losses),
            "scale": model.scale_,
            "parameters": model.parameters,
            "seconds": seconds,
            "device": device_name(device),
        }
