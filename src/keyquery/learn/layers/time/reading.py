"""The time kernel ψ of a time encoding, as a Reading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from keyquery.reading import Reading

POINTS = 1001  # default number of lags


@dataclass(frozen=True, kw_only=True)
class TimeKernel(Reading, kind="time kernel"):
    """ψ at some lags, its spectrum, and with per-head weights the score term ψ_h of each head."""

    units: ClassVar[Mapping[str, str]] = {
        "lags": "time between two events, in the unit of the times",
        "values": "ψ(lag), 1 at lag 0",
        "heads": "added to the score of each head",
        "frequency": "radians per unit of time",
        "share": "of ψ(0)",
    }

    lags: list[float]
    values: list[float]
    spectrum: list[dict[str, float]]  # frequency and share of each component
    heads: list[list[float]] | None = None

    def records(self) -> list[dict[str, Any]]:
        """One row per lag."""
        heads = {f"head_{number}": row for number, row in enumerate(self.heads or [])}
        columns = {"lag": self.lags, "psi": self.values, **heads}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def usual_lags(frequencies: Float64[Tensor, " f"]) -> Float64[Tensor, " lags"]:
    """From 0 to half of the longest period."""
    least = frequencies.abs().min().clamp(min=1e-6 * frequencies.abs().max().clamp(min=1e-300))
    return torch.linspace(0, math.pi / float(least), POINTS, dtype=torch.float64)


def checked_lags(lags: Any) -> Float64[Tensor, " lags"]:
    """Validated lags, as float64 on the CPU."""
    if not isinstance(lags, Tensor) or lags.ndim != 1 or len(lags) == 0 or not bool(lags.isfinite().all()):
        received = f"shape {tuple(lags.shape)}" if isinstance(lags, Tensor) else type(lags).__name__
        raise ValueError(f"lags must be a tensor (lags,) of finite numbers, at least one, got {received}")
    return lags.double().cpu()
