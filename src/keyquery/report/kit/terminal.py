"""A Reading as tables in the terminal, no wider than 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from keyquery.estimators import Reranking
from keyquery.instruments import (
    Ablation,
    Causes,
    Comparison,
    Depth,
    Explanation,
    Flow,
    Look,
    RankingScores,
    Transport,
    Turned,
)
from keyquery.printable import TEXT, printable, printable_copy
from keyquery.progress import WIDE
from keyquery.reading import Reading
from keyquery.report.abilities import abilities_tables
from keyquery.report.advised import depth_lines
from keyquery.report.caused import causes_lines, explanation_lines
from keyquery.report.classified import transport_study_tables
from keyquery.report.deepened import depth_study_tables
from keyquery.report.explained import causes_study_tables
from keyquery.report.filled import words_study_tables
from keyquery.report.flowed import flow_lines
from keyquery.report.foretold import time_tables
from keyquery.report.looked import Bar, columns_table, comparison_lines, look_lines
from keyquery.report.lost import ablation_lines, turned_lines
from keyquery.report.moved import reranking_lines, scores_lines
from keyquery.report.parsed import vision_language_tables
from keyquery.report.primal import primal_tables
from keyquery.report.ranked import rerank_study_tables
from keyquery.report.surveyed import survey_lines
from keyquery.report.told import datapoint_tables
from keyquery.report.trainings import kernels_tables
from keyquery.report.transported import transport_lines
from keyquery.studies import (
    Abilities,
    CausesStudy,
    DatapointStudy,
    DepthStudy,
    Kernels,
    Objectives,
    PrimalStudy,
    RerankStudy,
    TimeStudy,
    TransportStudy,
    VisionLanguageStudy,
    WordsStudy,
)
from keyquery.studies.texts import SHARES
from keyquery.survey.answers import Survey


def plain_console(stderr: bool = False) -> Console:
    """A console that takes no text for markup or for the name of an emoji."""
    return Console(stderr=stderr, markup=False, emoji=False)


def show(reading: Reading, console: Console) -> None:
    """Print a reading as its kind is shown, any other as its records.

    Its texts come out of files: none of them steers the terminal, or is taken for markup of rich.
    """
    lines, shown = LINES.get(type(reading)), printable_copy(reading, TEXT)
    for line in shown.records() if lines is None else lines(shown):
        console.print(line, markup=False, emoji=False)


@contextmanager
def progress_bars(console: Console, wanted: bool) -> Any:
    """A function that wraps an iterable in a bar on stderr; silent where that is no terminal."""
    named = TextColumn("{task.description}", markup=False)
    columns = (named, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bars:

        def watch(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
            return bars.track(items, total=total, description=printable(what, WIDE))

        yield watch


def _objectives(reading: Objectives) -> list[Any]:
    """Layer by layer, what heads became; then when each kind of head became what it is."""
    seeds = len({row["seed"] for row in reading.heads})
    table = columns_table("objective", "layer", Text("parts, mean over its heads"), "symmetry", "spread")
    for row in reading.summary():
        spread = "–" if row["symmetry_sd"] is None else f"± {row['symmetry_sd']:.2f}"
        shares = Bar([*(row[share] for share in SHARES), 0.0, 0.0])
        table.add_row(row["objective"], str(row["layer"]), shares, f"{row['symmetry']:+z.2f}", spread)
    lines = [
        f"{row['objective']}, seed {row['seed']}: loss {row['loss']:.3f} on held-out text" for row in reading.losses
    ]
    onsets: dict[tuple[str, str], list[int]] = {}
    for row in reading.onsets():
        onsets.setdefault((row["objective"], row["part"]), []).append(row["since"])
    said = (
        f"{objective}: {len(since)} heads end mostly {part}, and are so since step {median(since):.0f} (median)"
        for (objective, part), since in onsets.items()
    )
    title = Text(f"heads on held-out text, mean over heads and {seeds} seed{'s' if seeds > 1 else ''}", style="bold")
    return [title, table, "", *lines, *said]


# How each kind of reading is shown: as lines, tables and texts that rich prints.
LINES: dict[type[Reading], Callable[[Any], list[Any]]] = {
    Look: look_lines,
    Comparison: comparison_lines,
    Objectives: _objectives,
    Kernels: lambda reading: kernels_tables(reading, columns_table),
    PrimalStudy: lambda reading: primal_tables(reading, columns_table),
    TimeStudy: lambda reading: time_tables(reading, columns_table),
    Abilities: abilities_tables,
    Ablation: ablation_lines,
    Causes: causes_lines,
    CausesStudy: lambda reading: causes_study_tables(reading, columns_table),
    DatapointStudy: lambda reading: datapoint_tables(reading, columns_table),
    Depth: lambda reading: depth_lines(reading, columns_table),
    DepthStudy: lambda reading: depth_study_tables(reading, columns_table),
    TransportStudy: lambda reading: transport_study_tables(reading, columns_table),
    VisionLanguageStudy: lambda reading: vision_language_tables(reading, columns_table),
    Explanation: explanation_lines,
    Flow: flow_lines,
    RankingScores: lambda reading: scores_lines(reading, columns_table),
    RerankStudy: lambda reading: rerank_study_tables(reading, columns_table),
    Reranking: lambda reading: reranking_lines(reading, columns_table),
    Survey: lambda reading: survey_lines(reading, columns_table),
    Transport: lambda reading: transport_lines(reading, columns_table),
    Turned: turned_lines,
    WordsStudy: lambda reading: words_study_tables(reading, columns_table),
}
