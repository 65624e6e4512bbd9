"""Symmetric and skew energy of every head of a model during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from keyquery.checkpoints import read

# Symmetry at or below which a head counts as skew. Heads with random weights are near 0, small ones within this.
SKEW = -0.1


class Energies:
    """‖S‖² and ‖A‖² of every head at each recorded step; `missing` is the reason if the model cannot be read."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.missing = model, ""
        self._places: list[dict[str, Any]] = []
        self._values: list[list[tuple[float, float]]] = []
        try:
            self._measure()
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self.missing = str(error).split("\n")[0]

    def add(self) -> None:
        """Record all heads."""
        if not self.missing:
            self._values.append(self._measure())

    def rows(self, records: Sequence[int], steps: Sequence[int]) -> list[dict[str, Any]]:
        """One row per head: energies and symmetry at some records, and `since` which of all `steps` it is skew.

        `since` is the first recorded step from which on its symmetry stays at SKEW or below; None if it ends above.
        """
        rows = []
        for at, place in enumerate(self._places if self._values else []):
            every = [values[at] for values in self._values]
            shown = [every[record] for record in records]
            is_skew = [_symmetry(*values) <= SKEW for values in every]
            first = next((k for k in range(len(is_skew)) if all(is_skew[k:])), None)
            curves = {
                "symmetric_energy": [symmetric for symmetric, _ in shown],
                "skew_energy": [skew for _, skew in shown],
            }
            curves["symmetry"] = [_symmetry(*values) for values in shown]
            rows.append({**place, **curves, "since": None if first is None else steps[first]})
        return rows

    def _measure(self) -> list[tuple[float, float]]:
        places, values = [], []
        for layer in read(self.model):
            form = layer.form
            symmetric, skew = form.to(torch.promote_types(form.dtype, torch.float32)).core().energies
            pairs = zip(symmetric.flatten().tolist(), skew.flatten().tolist(), strict=True)
            for head, pair in enumerate(pairs):
                places.append({"layer": layer.index, "head": head, "name": f"{layer.name}.{head}"})
                values.append(pair)
        self._places = places
        return values


def _symmetry(symmetric: float, skew: float) -> float:
    return (symmetric - skew) / (symmetric + skew) if symmetric + skew else 0.0
