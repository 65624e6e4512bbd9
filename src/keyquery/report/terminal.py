"""A Reading as tables in the terminal, no wider than 100 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
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
from keyquery.report.colours import DOES
from keyquery.report.counted import corpus_tables
from keyquery.report.deepened import depth_study_tables
from keyquery.report.differences import difference_lines
from keyquery.report.explained import causes_study_tables
from keyquery.report.filled import words_study_tables
from keyquery.report.flowed import flow_lines
from keyquery.report.foretold import time_tables
from keyquery.report.lost import ablation_lines, turned_lines
from keyquery.report.moved import reranking_lines, scores_lines
from keyquery.report.parsed import vision_language_tables
from keyquery.report.primal import primal_tables
from keyquery.report.ranked import rerank_study_tables
from keyquery.report.surveyed import survey_lines
from keyquery.report.tokens import tokens_tables
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
from keyquery.survey.answers import Survey

# Far apart for every kind of colour vision, in light and dark terminals; shapes tell them apart without colour.
PARTS = dict(zip(DOES.values(), (("█", "blue"), ("▓", "yellow"), ("▒", "magenta"), ("░", "white")), strict=True))
BAR = 24
MOST_HEADS = 160


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


def _look(reading: Look) -> Group:
    model = reading.model
    family = f", family {model['family']}" if model.get("family") else ""
    shown = f"{len(reading.layers)} of " if len(reading.layers) < model["layers"] else ""
    layers = f"{shown}{model['layers']} layers, {len(reading.heads)} heads"
    title = f"{model['name']}{family}: {layers}, width {model['width']}"
    few = len(reading.heads) <= MOST_HEADS
    table = _heads_table(reading) if few else _layers_table(reading)
    tokens = [*tokens_tables(reading), *corpus_tables(reading)] if few else []
    return Group(Text(title, style="bold"), _legend(reading), table, *tokens, *_summary(reading))


def _heads_table(reading: Look) -> Table:
    on_data = any(head["on_data"] for head in reading.heads)
    table = _table("head", Text("what it does"), "raw", "folded", *(["on data"] if on_data else []), "rank", "verdict")
    for head in reading.heads:
        data = head["on_data"]
        table.add_row(
            Text(name_of(reading.model, head["layer"], head["head"])),
            _bar(_shares(head)),
            f"{head['raw']['symmetry']:+z.2f}",
            f"{head['folded']['symmetry']:+z.2f}",
            *([f"{data['symmetry']:+z.2f}" if data else "–"] if on_data else []),
            f"{head['raw']['effective_rank']:.0f}",
            head["verdict"],
        )
    return table


def _layers_table(reading: Look) -> Table:
    table = _table("layer", Text("what its heads do"), "symmetry", "direction", "of its heads")
    for layer in reading.layers:
        heads = [head for head in reading.heads if head["layer"] == layer["layer"]]
        values = sorted(head["raw"]["symmetry"] for head in heads)
        mean = [sum(parts) / len(heads) for parts in zip(*map(_shares, heads), strict=True)]
        table.add_row(
            Text(name_of(reading.model, layer["layer"])),
            _bar(mean),
            f"{layer['raw']['symmetry']:+z.2f}",
            f"{layer['raw']['directionality']:+z.2f}",
            f"{values[0]:+z.2f} … {values[-1]:+z.2f}",
        )
    return table


def _summary(reading: Look) -> list[str]:
    symmetry = median(layer["raw"]["symmetry"] for layer in reading.layers)
    direction = median(layer["raw"]["directionality"] for layer in reading.layers)
    together = f"symmetry {symmetry:+z.2f}, directionality {direction:+z.2f}"
    lines = [f"\nAll heads of a layer together, median over layers: {together}."]
    if all(head["on_data"] is None for head in reading.heads):
        lines.append(f"Weights drawn at random have symmetry 1/width = {1 / reading.model['width']:.3f}.")
        lines.append("What heads do on data, and whether they follow the crowd: --text FILE.")
    counts = Counter(head["verdict"].split(" ")[0] for head in reading.heads)
    lines.append("Verdicts: " + ", ".join(f"{count} {kernel}" for kernel, count in counts.most_common()) + ".")
    if len(reading.heads) > MOST_HEADS:
        lines.append("Each head: --layers to choose some, --csv or --json for all.")
    notes = sorted({note for layer in reading.layers for note in layer.get("notes", [])})
    few = (reading.provenance.get("data") or {}).get("note")
    notes += [few] if few else []
    return lines + [f"Note: {note}." for note in notes]


def _comparison(reading: Comparison) -> list[Any]:
    looks, differences = reading.looks, difference_lines(reading, _table)
    if len({(len(look.layers), len(look.heads)) for look in looks}) > 1:
        shown = (part for look in looks for part in (_look(look), ""))
        return [*shown, *differences, "", *map(_in_short, looks)]
    if reading.changes and all(change["rows"] is not None for change in reading.changes):
        return [*differences, "", *map(_in_short, looks)]
    apart = len(looks[0].heads) <= MOST_HEADS
    columns = (column for look in looks for column in (Text(look.model["name"]), "symmetry"))
    table = _table("head" if apart else "layer", *columns)
    everything = list(zip(*(look.heads if apart else look.layers for look in looks), strict=True))
    unequal = [rows for rows in everything if any(_figures(row) != _figures(rows[0]) for row in rows[1:])]
    equal = len(everything) - len(unequal)
    for rows in unequal:
        cells: list[Any] = [Text(name_of(looks[0].model, rows[0]["layer"], rows[0]["head"] if apart else None))]
        for row in rows:
            figures = row.get("on_data") or row["raw"]
            cells += [_bar(_shares(row)), f"{figures['symmetry']:+z.2f}"]
        table.add_row(*cells)
    beside = (part for look in looks if apart for part in corpus_tables(look))
    what = "heads" if apart else "layers"
    said = [f"{equal} of {len(everything)} {what} have equal figures and are not shown."] if equal else []
    tables = [_legend(looks[0]), table] if unequal else []
    return [*differences, "", *tables, *said, "", *map(_in_short, looks), *beside]


def _figures(row: dict[str, Any]) -> Any:
    return row["raw"], row.get("folded"), row.get("on_data")


def _objectives(reading: Objectives) -> list[Any]:
    """Layer by layer, what heads became; then when each kind of head became what it is."""
    seeds = len({row["seed"] for row in reading.heads})
    table = _table("objective", "layer", Text("what its heads do"), "symmetry", "spread")
    for row in reading.summary():
        spread = "–" if row["symmetry_sd"] is None else f"± {row['symmetry_sd']:.2f}"
        bar = _bar([row["reciprocal"], row["directional"], row["popularity"], 0.0])
        table.add_row(row["objective"], str(row["layer"]), bar, f"{row['symmetry']:+z.2f}", spread)
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


def _in_short(look: Look) -> str:
    """One line: what the heads of a model do on the whole."""
    shares = [sum(parts) / len(look.heads) for parts in zip(*map(_shares, look.heads), strict=True)]
    said = ", ".join(f"{name} {share:.0%}" for name, share in zip(PARTS, shares, strict=True) if share >= 0.005)
    median_ = median(row["raw"]["symmetry"] for row in look.layers)
    return f"{look.model['name']}: {said}; raw symmetry, median over layers: {median_:+z.2f}."


def _table(first: str, *columns: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first)
    for column in columns:
        words = column if isinstance(column, str) else None
        table.add_column(column, justify="left" if words in (None, "verdict") else "right", no_wrap=words is not None)
    return table


def _shares(head: dict[str, Any]) -> list[float]:
    """What the head does: shares on data, or of its energy where there is none."""
    data = head.get("on_data")
    if data:
        return [data[name] for name in ("reciprocal", "directional", "popularity", "position")]
    share = (1 + head["raw"]["symmetry"]) / 2
    return [share, 1 - share, 0.0, 0.0]


def _legend(reading: Look) -> Text:
    on_data = [head["on_data"] for head in reading.heads if head["on_data"]]
    count = 2 if not on_data else 4 if any(data["position"] > 0 for data in on_data) else 3
    what = "of the variance of its scores on data" if on_data else "of the energy of its weights"
    parts = [Text.assemble((mark, colour), f" {name}") for name, (mark, colour) in list(PARTS.items())[:count]]
    return Text.assemble("shares ", what, ": ", Text("  ").join(parts))


def _bar(shares: list[float]) -> Text:
    """Shares as one bar of fixed width, whatever they add up to."""
    sums = [sum(shares[: i + 1]) for i in range(len(shares))]
    ends = [round(BAR * min(max(at, 0.0), 1.0)) for at in sums]
    starts = [0, *ends[:-1]]
    looks = list(PARTS.values())
    return Text.assemble(
        *((mark * (end - start), colour) for start, end, (mark, colour) in zip(starts, ends, looks, strict=True))
    )


# How each kind of reading is shown: as lines, tables and texts that rich prints.
LINES: dict[type[Reading], Callable[[Any], list[Any]]] = {
    Look: lambda reading: [_look(reading)],
    Comparison: _comparison,
    Objectives: _objectives,
    Kernels: lambda reading: kernels_tables(reading, _table),
    PrimalStudy: lambda reading: primal_tables(reading, _table),
    TimeStudy: lambda reading: time_tables(reading, _table),
    Abilities: abilities_tables,
    Ablation: ablation_lines,
    Causes: causes_lines,
    CausesStudy: lambda reading: causes_study_tables(reading, _table),
    DatapointStudy: lambda reading: datapoint_tables(reading, _table),
    Depth: lambda reading: depth_lines(reading, _table),
    DepthStudy: lambda reading: depth_study_tables(reading, _table),
    TransportStudy: lambda reading: transport_study_tables(reading, _table),
    VisionLanguageStudy: lambda reading: vision_language_tables(reading, _table),
    Explanation: explanation_lines,
    Flow: flow_lines,
    RankingScores: lambda reading: scores_lines(reading, _table),
    RerankStudy: lambda reading: rerank_study_tables(reading, _table),
    Reranking: lambda reading: reranking_lines(reading, _table),
    Survey: lambda reading: survey_lines(reading, _table),
    Transport: lambda reading: transport_lines(reading, _table),
    Turned: turned_lines,
    WordsStudy: lambda reading: words_study_tables(reading, _table),
}
