"""The study of objectives as terminal tables."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.text import Text

from keyquery.forms.parts import PARTS
from keyquery.instruments.look.show.terminal import Bar
from keyquery.pages.tables import columns_table
from keyquery_studies.objectives.figure import curves
from keyquery_studies.objectives.study import Objectives


def lines(reading: Objectives) -> list[Any]:
    """Layer by layer, what heads became; then when each kind of head became what it is."""
    seeds = len({row["seed"] for row in reading.heads})
    table = columns_table("objective", "layer", Text("parts, mean over its heads"), "symmetry", "sd over seeds")
    for row in reading.summary():
        spread = "–" if row["symmetry_sd"] is None else f"± {row['symmetry_sd']:.2f}"
        shares = Bar([row[part] for part in PARTS])
        table.add_row(row["objective"], str(row["layer"]), shares, f"{row['symmetry']:+z.2f}", spread)
    lines = [
        f"{row['objective']}, seed {row['seed']}: loss {row['loss']:.3f} on held-out text" for row in reading.losses
    ]
    onsets: dict[tuple[str, str], list[int]] = {}
    for row in reading.onsets():
        onsets.setdefault((row["objective"], row["part"]), []).append(row["since"])
    caption = (
        f"{objective}: {len(since)} heads end mostly {part}, and are so since step {median(since):.0f} (median)"
        for (objective, part), since in onsets.items()
    )
    title = Text(f"heads on held-out text, mean over heads and {seeds} seed{'s' if seeds > 1 else ''}", style="bold")
    return [title, table, "", *lines, *caption]


FIGURES = {"curves": curves}
