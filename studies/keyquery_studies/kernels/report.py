"""The study of kernels as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.kernels.figure import panels
from keyquery_studies.kernels.study import Kernels


def lines(reading: Kernels) -> list[Any]:
    """Heads at initialisation, errors by sample size, and losses compared with the unconstrained kernel."""
    rows = reading.summary()
    shown: list[Any] = []
    parts = {"start": _starts, "synthetic": _synthetic, "language": _language, "init": _initialisations}
    parts["longer"] = _longer
    for part, show in parts.items():
        part_rows = [row for row in rows if row["part"] == part]
        if part_rows:
            shown += [*([""] if shown else []), *show(part_rows)]
    return shown


def _starts(rows: list[dict[str, Any]]) -> list[Any]:
    table = columns_table("layer", "width", "seeds", "skew")
    for row in rows:
        table.add_row(row["layer"], str(row["width"]), str(row["seeds"]), _spread(row, "skew", 4))
    return [Text("heads at initialisation: skew share of their energy", style="bold"), table]


def _synthetic(rows: list[dict[str, Any]]) -> list[Any]:
    sizes = sorted({row["samples"] for row in rows})
    table = columns_table("task", Text("kernel"), *(f"{size:,}" for size in sizes))
    for task, kernel in dict.fromkeys((row["task"], row["kernel"]) for row in rows):
        at = {row["samples"]: row["error"] for row in rows if (row["task"], row["kernel"]) == (task, kernel)}
        table.add_row(task, kernel, *(f"{at[size]:.3f}" if size in at else "–" for size in sizes))
    return [
        Text(f"error (1: uniform weights) by number of training sequences, mean of {seeds_of(rows)}", style="bold"),
        table,
    ]


def _language(rows: list[dict[str, Any]]) -> list[Any]:
    table = columns_table("objective", "text", "positions", "arm", "rate", "loss", "Δ [95 %]", "p")
    for column in table.columns[:4]:
        column.justify, column.no_wrap = "left", True
    for row in rows:
        table.add_row(*_place(row), _rate(row), f"{row['loss']:.3f}", _interval(row), _p(row))
    caption = "Δ: to unconstrained, paired by seed; p by Holm. Rates marked * are at the edge of their grid."
    return [Text(f"language models: test loss, nats per token, mean of {seeds_of(rows)}", style="bold"), table, caption]


def _initialisations(rows: list[dict[str, Any]]) -> list[Any]:
    table = columns_table("objective", "start", "rate", "loss", "Δ to default [95 %]", "p")
    for column in table.columns[:2]:
        column.justify, column.no_wrap = "left", True
    for row in rows:
        table.add_row(row["objective"], row["init"], _rate(row), _spread(row, "loss", 3), _interval(row), _p(row))
    return [Text(f"starts of the unconstrained kernel, mean of {seeds_of(rows)}", style="bold"), table]


def _longer(rows: list[dict[str, Any]]) -> list[Any]:
    table = columns_table("objective", "text", "positions", "arm", "rate", "loss", "fell", "Δ [95 %]", "p")
    for column in table.columns[:4]:
        column.justify, column.no_wrap = "left", True
    for row in rows:
        fell = "–" if row["fell"] is None else f"{row['fell']:.3f}"
        table.add_row(*_place(row), _rate(row), f"{row['loss']:.3f}", fell, _interval(row), _p(row))
    caption = (
        "fell: what the second half of the steps lowered the loss by. Δ: to unconstrained, paired by seed; p by Holm."
        " Rates marked * are at the edge of their grid."
    )
    steps = " or ".join(f"{steps:,}" for steps in sorted({row["steps"] for row in rows}))
    title = f"small language models after {steps} steps: test loss, mean of {seeds_of(rows)}"
    return [Text(title, style="bold"), table, caption]


def _place(row: dict[str, Any]) -> tuple[str, ...]:
    share = "all" if row["share"] == 1 else f"{row['share']:.0%}"
    return row["objective"], share, "RoPE" if row["rope"] else "learned", row["arm"]


def _rate(row: dict[str, Any]) -> str:
    return f"{row['lr']:g}" + "*" * row["edge"]


def _interval(row: dict[str, Any]) -> str:
    if row["gap"] is None:
        return "–"
    return f"{row['gap']:+.3f}" + (
        "" if row["gap_low"] is None else f" [{row['gap_low']:+.3f}, {row['gap_high']:+.3f}]"
    )


def _p(row: dict[str, Any]) -> str:
    return "–" if row["gap_p"] is None else f"{row['gap_p']:.3f}"


def seeds_of(rows: list[dict[str, Any]]) -> str:
    """How many seeds a mean is over, in words."""
    count = max(row["seeds"] for row in rows)
    return f"{count} seed{'s' if count > 1 else ''}"


def _spread(row: dict[str, Any], name: str, places: int, sign: str = "") -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:{sign}.{places}f}" + ("" if spread is None else f" ± {spread:.{places}f}")


FIGURES = {"panels": panels}
