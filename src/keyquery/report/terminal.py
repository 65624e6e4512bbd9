"""A Reading as a table in the terminal."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keyquery.instruments.geometry import Look
from keyquery.reading import Reading

SYMMETRIC, SKEW = "blue", "yellow"  # far apart for every kind of colour vision, in light and dark terminals
BAR = 20


def show(reading: Reading, console: Console) -> None:
    """Print a reading: a Look as its table of heads, any other as its fields."""
    if isinstance(reading, Look):
        _show_look(reading, console)
        return
    for record in reading.records():
        console.print(record)


def _show_look(reading: Look, console: Console) -> None:
    model = reading.model
    title = f"{model['name']}: {model['layers']} layers, {model['heads']} heads, width {model['width']}"
    table = Table(title=title, title_justify="left", header_style="", box=None, pad_edge=False)
    table.add_column("head")
    table.add_column(_bar_header())
    for name in ("symmetry", "positive", "eff. rank", "direction"):
        table.add_column(name, justify="right")
    for head in reading.heads:
        raw = head["raw"]
        table.add_row(
            f"{head['layer']}.{head['head']}",
            _bar(raw["symmetry"]),
            f"{raw['symmetry']:+z.2f}",
            f"{raw['positive_share']:.0%}",
            f"{raw['effective_rank']:.1f}",
            f"{raw['directionality']:+z.2f}",
        )
    console.print(table)
    mean = fmean(head["raw"]["symmetry"] for head in reading.heads)
    console.print(
        f"\nMean symmetry {mean:+.3f}. Weights drawn at random have 1/width = {1 / model['width']:.3f}: half of"
    )
    console.print("such a head compares, half of it points. Training moves that.")


def _bar_header() -> Text:
    return Text.assemble(("compares", SYMMETRIC), " · ", ("points", SKEW))


def _bar(symmetry: float) -> Text:
    filled = round(BAR * (1 + symmetry) / 2)
    return Text.assemble(("█" * filled, SYMMETRIC), ("░" * (BAR - filled), SKEW))
