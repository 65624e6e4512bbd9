"""Scores of rankings in the terminal."""

from __future__ import annotations

from typing import Any

from keyquery.learn.rankings.rankings import RankingScores
from keyquery.pages.tables import Text, columns_table


def lines(reading: RankingScores) -> list[Any]:
    """The mean of every metric."""
    table = columns_table("metric", "mean")
    for name, value in reading.mean.items():
        table.add_row(name, f"{value:.4f}")
    skipped = len(reading.rows) - len(reading.scored)
    title = f"{len(reading.scored)} queries" + (f", {skipped} without relevant items excluded" if skipped else "")
    return [Text(title, style="bold"), table]
