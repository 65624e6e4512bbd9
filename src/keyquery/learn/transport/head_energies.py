"""Symmetric and skew energy of every head of a model during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import read

# Symmetry at or below which a head counts as skew. Heads with random weights are near 0, small ones within this.
SKEW = -0.1


class Energies:
    """‖S‖² and ‖A‖² of every head at each recorded step; `missing` is the reason if the model cannot be read."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.missing = model, ""
        self._heads: list[dict[str, Any]] = []
        self._values: list[Tensor] = []

    def add(self) -> None:
        """Record all heads."""
        if self.missing:
            return
        try:
            layers = [
                (layer, layer.form.to(torch.promote_types(layer.form.dtype, torch.float32)))
                for layer in read(self.model)
            ]
            energies = [torch.stack([part.flatten() for part in form.core().energies]).cpu() for _, form in layers]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self.missing = str(error).split("\n")[0]
            return
        self._values.append(torch.cat(energies, 1))
        self._heads = [
            {"layer": layer.index, "head": head, "name": f"{layer.name}.{head}"}
            for (layer, _), values in zip(layers, energies, strict=True)
            for head in range(values.shape[1])
        ]

    def rows(self, records: Sequence[int], steps: Sequence[int]) -> list[dict[str, Any]]:
        """One row per head: energies and symmetry at some records, and `since` which of all `steps` it is skew.

        `since` is the first recorded step from which on its symmetry stays at SKEW or below; None if it ends above.
        """
        if not self._values:
            return []
        symmetric, skew = torch.stack(self._values, 1)
        total = symmetric + skew
        symmetry = (symmetric - skew) / total.where(total > 0, 1)
        curves = {"symmetric_energy": symmetric, "skew_energy": skew, "symmetry": symmetry}
        rows = []
        for number, head in enumerate(self._heads):
            above = (symmetry[:, number] > SKEW).nonzero()
            first = int(above[-1]) + 1 if len(above) else 0
            shown = {name: values[list(records), number].tolist() for name, values in curves.items()}
            rows.append({**head, **shown, "since": steps[first] if first < len(steps) else None})
        return rows
