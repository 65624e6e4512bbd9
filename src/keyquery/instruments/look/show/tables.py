"""Tables of a look beside its heads: compared with a corpus, directions described by tokens, and roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.corpus import NAMES, level
from keyquery.instruments.look.reading import Look
from keyquery.instruments.roles.show import role_name, role_table, rule
from keyquery.pages.tables import Table, Text


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
        table.add_row(label, *(_corpus_cell(head["corpus"], name) for name in NAMES))
    return [Text(""), Text(_corpus_title(reading), style="bold"), table, *_corpus_legend(heads)]


def _corpus_title(reading: Look) -> str:
    facts = reading.corpus or {}
    where = f"{facts['from']}, " if facts.get("from") else ""
    tokens = f"{facts['tokens']:,} tokens, " if facts.get("tokens") else ""
    return f"{reading.model['name']} against {where}{tokens}pairs of its {facts['compared']} most frequent tokens"


def _corpus_cell(metrics: dict[str, float], name: str) -> Any:
    """A value with its null level in parentheses; dim if it does not exceed it."""
    value, least = metrics[name], level(metrics, name)
    if name == "explained":
        return Text(f"{value:.1%} ({least:.1%})", style="" if value > least else "dim")
    return Text(f"{value:+z.2f} ({least:.2f})", style="" if abs(value) > least else "dim")


def _corpus_legend(heads: list[dict[str, Any]]) -> list[str]:
    beyond = {name: sum(abs(h["corpus"][name]) > level(h["corpus"], name) for h in heads) for name in NAMES}
    counts = f"{beyond['symmetric_cosine']} in the symmetric part, {beyond['skew_cosine']} in the skew part"
    return [
        f"\nAbove the null level, of {len(heads)} heads: {counts}; a negative cosine opposes the corpus.",
        "Cosines with the corpus PPMI; in parentheses the 95th percentile of random heads or shuffled tokens.",
        "skew: positive attends to tokens that follow in the corpus, negative to tokens that precede.",
    ]


ROWS = 80  # rows; more would scroll the labels out of view
CELL = 35  # characters; two cells and the head fit into 80 columns


def tokens_tables(reading: Look) -> list[Any]:
    """A row per direction: the tokens at both of its ends, and query-key pairs of tokens.

    Long cells end in an ellipsis. Empty if the look has no directions.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("head", "symmetric: from one end to the other", "skew: query → key"):
        table.add_column(title, no_wrap=True)
    for head in reading.heads:
        name = Text(name_of(reading.model, head["layer"], head["head"]))
        for direction, plane in zip_longest(head.get("objects", []), head.get("relations", [])):
            table.add_row(name, _cell(_ends(direction)), _cell(_pairs(plane)))
            name = Text("")
    if table.row_count > ROWS:
        return [
            Text(""),
            Text(f"{table.row_count} token directions: use --html to see all, or --layers to select some."),
        ]
    return [Text(""), table] if table.row_count else []


def _ends(direction: dict[str, Any] | None) -> str:
    if direction is None:
        return ""
    return " … ".join(" ".join(direction[end][:3]) for end in ("tokens", "opposite"))


def _pairs(plane: dict[str, Any] | None) -> str:
    return "" if plane is None else ", ".join("→".join(pair) for pair in plane["pairs"][:3])


def _cell(text: str) -> Any:
    cell = Text(text)
    cell.truncate(CELL, overflow="ellipsis")
    return cell


def has_roles(look: Look) -> bool:
    """Whether roles were measured."""
    return any("roles" in head for head in look.heads)


def roles_of(heads: Sequence[Mapping[str, Any]]) -> str:
    """The most specific role of each head, counted if several heads share it."""
    counts = Counter(role_name(role) for head in heads if (role := head.get("roles", {}).get("role")))
    return ", ".join(role if count == 1 else f"{count} {role}" for role, count in counts.most_common())


def role_tables(reading: Look) -> list[Any]:
    """A row per role with its strongest heads; empty if roles were not measured."""
    if not has_roles(reading):
        return []
    heads = [{**head, **head["roles"]} for head in reading.heads if "roles" in head]
    facts = reading.provenance.get("roles") or {}
    notes = [f"Note: {note}." for note in facts.get("notes", [])]
    title = f"{reading.model['name']}: heads by role"
    return [Text(""), Text(title, style="bold"), role_table(heads, reading.model), *rule(facts), *notes]
