"""Each head compared with the co-occurrence of a corpus, as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.corpus import NAMES, level
from keyquery.instruments.look.reading import Look


def corpus_tables(reading: Look) -> list[Any]:
    """A row per head: cosine similarity of its parts with those of the corpus, null levels, and explained share.

    Empty if no corpus was given.
    """
    facts = reading.corpus
    if facts is None:
        return []
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("head", "symmetric cosine", "skew cosine", "explained"):
        table.add_column(title, justify="left" if title == "head" else "right", no_wrap=True)
    heads = [head for head in reading.heads if "corpus" in head]
    for head in heads:
        label = Text(name_of(reading.model, head["layer"], head["head"]))
        table.add_row(label, *(_cell(head["corpus"], name) for name in NAMES))
    return [Text(""), Text(_title(reading), style="bold"), table, *_legend(heads)]


def _title(reading: Look) -> str:
    facts = reading.corpus or {}
    where = f"{facts['from']}, " if facts.get("from") else ""
    tokens = f"{facts['tokens']:,} tokens, " if facts.get("tokens") else ""
    return f"{reading.model['name']} against {where}{tokens}pairs of its {facts['compared']} most frequent tokens"


def _cell(metrics: dict[str, float], name: str) -> Text:
    """A value with its null level in parentheses; dim if it does not exceed it."""
    value, least = metrics[name], level(metrics, name)
    if name == "explained":
        return Text(f"{value:.1%} ({least:.1%})", style="" if value > least else "dim")
    return Text(f"{value:+z.2f} ({least:.2f})", style="" if abs(value) > least else "dim")


def _legend(heads: list[dict[str, Any]]) -> list[str]:
    beyond = {name: sum(abs(h["corpus"][name]) > level(h["corpus"], name) for h in heads) for name in NAMES}
    counts = f"{beyond['symmetric_cosine']} in the symmetric part, {beyond['skew_cosine']} in the skew part"
    return [
        f"\nAbove the null level, of {len(heads)} heads: {counts}; a negative cosine opposes the corpus.",
        "Cosines with the corpus PPMI; in parentheses the 95th percentile of random heads or shuffled tokens.",
        "skew: positive attends to tokens that follow in the corpus, negative to tokens that precede.",
    ]
