"""The study of lineage as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.pages.tables import columns_table
from keyquery_studies.lineage.figure import trail
from keyquery_studies.lineage.study import Kinship


def lines(reading: Kinship) -> list[Any]:
    """Unrelated pairs, and what is made of a base, by kind."""
    null = columns_table(
        "config",
        "set",
        "test",
        "pairs",
        "mean",
        "sd",
        "largest",
        "KS",
        "p",
        "p by models",
        "p disjoint",
        "false alarms",
    )
    for row in reading.nulls():
        figures = (f"{row[name]:.2f}" for name in ("mean", "sd", "largest", "ks"))
        place = (row["config"], row["set"], row["test"], str(row["pairs"]))
        tests = (f"{row[name]:.2g}" for name in ("ks_p", "models_p", "disjoint_p"))
        null.add_row(*place, *figures, *tests, str(row["alarms"]))
    kin = columns_table("kind", "n", "found", "AUC basis-free", "AUC shared", "‖ΔM‖/‖M‖", "Δ loss", "labels")
    for row in sorted(reading.kinds(), key=lambda row: row["kind"]):
        areas = (f"{row[name]:.3f}" for name in ("free_area", "shared_area"))
        change = "–" if row["change"] is None else f"{row['change']:.2g}"
        labels = ", ".join(f"{count} {label}" for label, count in row["labels"].items())
        counts = (row["kind"], str(row["models"]), str(row["found"]))
        kin.add_row(*counts, *areas, change, f"{row['loss']:+.3f}", labels)
    titles = [Text(title, style="bold") for title in ("unrelated pairs", "models made from a base")]
    return [
        titles[0],
        null,
        "",
        titles[1],
        kin,
        "KS: distance of p-values to the uniform distribution; the last two p allow for pairs that share a model.",
    ]


FIGURES = {"trail": trail}
