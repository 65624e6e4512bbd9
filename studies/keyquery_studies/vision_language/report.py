"""The study of vision and language as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.kernels.report import seeds_of
from keyquery_studies.vision_language.figure import PARTS, seen
from keyquery_studies.vision_language.study import FEWEST, VisionLanguageStudy


def lines(reading: VisionLanguageStudy) -> list[Any]:
    """Accuracy of every variant, effect of ablating score parts, and correlation of flow with the loss."""
    rows, shown = reading.summary(), list[Any]()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        dataset_rows = [row for row in rows if row["dataset"] == dataset]
        table = columns_table("variant", "matching", "relations", "R@1", "R@5", "R@10", "filled", "both", "CPU s")
        table.columns[0].no_wrap = True
        for row in dataset_rows:
            names = ("texts_at_1", "texts_at_5", "texts_at_10", "filled", "filled_both")
            cells = [_spread(row, name) for name in ("matching", "relations")] + [f"{row[name]:.2f}" for name in names]
            table.add_row(row["variant"], *cells, f"{row['seconds']:.0f}")
        caption = f"{dataset}: accuracy on unseen pairs, {seeds_of(dataset_rows)}"
        shown += [*([""] if shown else []), Text(caption, style="bold"), table]
    shown += ["Half of the matching pairs are true. R: text retrieval, among 40.", ""]
    return [*shown, *_turned(reading), "", *_flow(reading)]


def _turned(reading: VisionLanguageStudy) -> list[Any]:
    table = columns_table("set", "variant", "task", *PARTS)
    for column in table.columns[:3]:
        column.justify, column.no_wrap = "left", True
    rows = reading.turned()
    for dataset, variant, task in dict.fromkeys((row["dataset"], row["variant"], row["task"]) for row in rows):
        at = {
            row["part"]: row
            for row in rows
            if (row["dataset"], row["variant"], row["task"]) == (dataset, variant, task)
        }
        table.add_row(dataset, variant, task, *(f"{at[part]['change']:+.2f}" for part in PARTS))
    return [Text("matching loss without a part of the joint encoder's scores, change in nats", style="bold"), table]


def _flow(reading: VisionLanguageStudy) -> list[Any]:
    table = columns_table("set", "over", "flow", "correlation", "95 %", "points")
    for column in table.columns[:3]:
        column.justify, column.no_wrap = "left", True
    for row in reading.correlations():
        interval = f"{row['low']:+.2f} to {row['high']:+.2f}"
        table.add_row(
            row["dataset"], row["over"], row["reading"], f"{row['correlation']:+.2f}", interval, str(row["points"])
        )
    shown = table if table.row_count else f"No dataset has the {FEWEST} trainings that an interval needs."
    return [
        Text("flow above the null level and the increase of the text loss with shuffled images", style="bold"),
        shown,
    ]


def _spread(row: dict[str, Any], name: str) -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")


FIGURES = {"seen": seen}
