"""The time kernel ψ of a time encoding, as a Reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from keyquery.reading import Reading


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
