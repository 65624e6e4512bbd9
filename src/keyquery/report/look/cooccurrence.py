"""Each head beside the co-occurrence of a corpus, as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.corpus import NAMES, level
from keyquery.instruments.look.look import Look


def corpus_tables(reading: Look) -> list[Any]:
    """A line per head: how alike its parts are to the corpus's, what is chance, and how much that explains.

    Nothing where no corpus was given.
    """
    facts = reading.corpus
    if facts is None:
        return []
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("head", "symmetric as the corpus", "skew as the corpus", "explained"):
        table.add_column(title, justify="left" if title == "head" else "right", no_wrap=True)
    heads = [head for head in reading.heads if "corpus" in head]
    for head in heads:
        figures = head["corpus"]
        name = Text(name_of(reading.model, head["layer"], head["head"]))
        table.add_row(name, *(_cell(figures, name) for name in NAMES))
    return [Text(""), Text(_title(reading), style="bold"), table, *_legend(heads)]


def _title(reading: Look) -> str:
    facts = reading.corpus or {}
    where = f"{facts['from']}, " if facts.get("from") else ""
    tokens = f"{facts['tokens']:,} tokens, " if facts.get("tokens") else ""
    return f"{reading.model['name']} beside {where}{tokens}pairs of its {facts['compared']} most frequent"


def _cell(figures: dict[str, float], name: str) -> Text:
    """A figure, and in brackets what it must exceed; dim where it does not."""
    value, least = figures[name], level(figures, name)
    if name == "explained":
        return Text(f"{value:.1%} ({least:.1%})", style="" if value > least else "dim")
    return Text(f"{value:+z.2f} ({least:.2f})", style="" if abs(value) > least else "dim")


def _legend(heads: list[dict[str, Any]]) -> list[str]:
    beyond = {name: sum(abs(h["corpus"][name]) > level(h["corpus"], name) for h in heads) for name in NAMES}
    said = f"{beyond['symmetric_cosine']} in the symmetric part, {beyond['skew_cosine']} in the skew part"
    return [
        f"\nBeyond chance, of {len(heads)} heads: {said}; minus is against the corpus.",
        "Cosines with its PPMI; in brackets what 95 of 100 heads at random, or shuffled tokens, stay below.",
        "skew: above 0 at what comes after a token, below 0 at what comes before it.",
    ]
