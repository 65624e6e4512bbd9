"""A causal graph over columns in the terminal, as a figure and as a page."""

from __future__ import annotations

from typing import Any

from keyquery.learn.discover.discover import Discovery
from keyquery.pages.components import column, versioned
from keyquery.pages.document import document
from keyquery.pages.rings import (
    MEANS,
    STYLE,
    Ring,
    drawing,
    edge_text,
    inline,
    key_inline,
    kind_of,
    kinds_of,
    panels_figure,
    ring_of,
)
from keyquery.pages.tables import Table, Text
from keyquery.support.printable import counted

LISTED = 40  # edges that are shown


def facts_of(reading: Discovery) -> list[str]:
    """How the graph was found, as short texts."""
    rows = [] if reading.rows is None else [f"{reading.rows:,} rows, level {reading.alpha:g}"]
    rows += [f"{reading.dropped:,} rows with missing values left out"] if reading.dropped else []
    facts = [f"{len(reading.variables)} variables", *rows, f"{reading.method} with {reading.test}"]
    facts += [f"{reading.tests:,} tests" + ("" if reading.done else ", stopped early")]
    facts += [f"{len(set(reading.tiers))} tiers"] if reading.tiers is not None else []
    facts += [f"{len(reading.forbidden)} forbidden"] if reading.forbidden else []
    facts += [f"{len(reading.required)} required"] if reading.required else []
    facts += ["selection bias allowed"] if reading.selection else []
    return facts + ([f"{reading.resamples} resamples"] if reading.resamples else [])


def lines(reading: Discovery) -> list[Any]:
    """Title, facts, edges, and what the kinds of edges mean."""
    lines: list[Any] = [Text(reading.name, style="bold"), Text(", ".join(facts_of(reading))), ""]
    table, shares = Table(box=None, pad_edge=False, header_style=""), reading.shares()
    for title in ("edge", "meaning", *(["resamples"] if reading.resamples else [])):
        table.add_column(title, justify="right" if title == "resamples" else "left", no_wrap=True)
    for i, j, at_i, at_j in reading.edges[:LISTED]:
        text = edge_text(reading.variables[i], reading.variables[j], at_i, at_j)
        share = [f"{shares.get((i, j), 0.0):.0%}"] if reading.resamples else []
        table.add_row(Text(text), MEANS[kind_of(at_i, at_j)], *share)
    lines += [table if reading.edges else "No edges: all variables are independent of each other."]
    if (count := len(reading.edges)) > LISTED:
        lines += [f"The first {LISTED} of {count} edges; --json, --csv or --html for all."]
    return lines


def panel(reading: Discovery) -> Ring:
    """Variables on a ring; lines are thinner where few resamples have the edge."""
    note = f"{len(reading.edges)} edges, {reading.tests:,} tests" + ("" if reading.done else ", stopped early")
    seen, shares = reading.shares(), {}
    for i, j, _, _ in reading.pag().edges():
        share = seen.get((i, j), 0.0)
        shares[i, j] = (share, f" in {share:.0%} of {reading.resamples} resamples") if reading.resamples else (1.0, "")
    return ring_of(
        dict(enumerate(reading.variables)),
        reading.pag().edges(),
        f"{reading.method} with {reading.test}",
        note,
        shares,
        {},
    )


def graph_figure(reading: Discovery, pyplot: Any) -> Any:
    """The graph as a matplotlib figure."""
    return panels_figure([panel(reading)], kinds_of(reading.pag().edges()), reading.name, pyplot)


def svg(reading: Discovery) -> str:
    """The graph as SVG, for light and dark backgrounds."""
    label = f"Causal graph over the {len(reading.variables)} variables of {reading.name}"
    return drawing([panel(reading)], kinds_of(reading.pag().edges()), reading.name, label)


FIGURES = {"graph": graph_figure}


def page(reading: Discovery) -> str:
    """The graph over variables, its edges, and how often pairs are adjacent in resamples."""
    keys = kinds_of(reading.pag().edges())
    figures = [inline(panel(reading)), *map(key_inline, keys)]
    words = [[name, str(node), ""] for node, name in enumerate(reading.variables)]
    legend = [[kind, MEANS[kind]] for kind in keys]
    edges = counted(len(reading.edges), "edge")
    none = "No edges: all variables are independent of each other."
    sentence = f"{edges} between {counted(len(reading.variables), 'variable')}." if reading.edges else none
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [sentence, *_knowledge(reading)]},
        {
            "type": "graph",
            "place": "seven",
            "title": "The graph",
            "note": "click a variable for its edges",
            "noun": "variable",
            "words": words,
            "legend": legend,
            "pictures": [0],
        },
        {"type": "table", "place": "five", "title": "Edges", "columns": _edges(reading)},
        *_resamples(reading),
    ]
    facts, notes = " · ".join(facts_of(reading)), versioned([], reading.provenance)
    return document(reading.name, "causal graph", [{"blocks": blocks}], facts, notes, figures, style=STYLE)


def _knowledge(reading: Discovery) -> list[str]:
    known = [f"{a} does not cause {b}" for a, b in reading.forbidden] + [f"{a} → {b}" for a, b in reading.required]
    if reading.tiers is not None:
        tiers = sorted(set(reading.tiers))
        pairs = list(zip(reading.variables, reading.tiers, strict=True))
        known.insert(0, "order: " + " | ".join(", ".join(n for n, own in pairs if own == tier) for tier in tiers))
    return [f"Background knowledge: {'; '.join(known)}."] if known else []


def _edges(reading: Discovery) -> list[dict[str, Any]]:
    shares = reading.shares()
    edges = [edge_text(reading.variables[i], reading.variables[j], *marks) for i, j, *marks in reading.edges]
    columns = [
        column("edge", edges),
        column("meaning", [MEANS[kind_of(at_i, at_j)] for _, _, at_i, at_j in reading.edges]),
    ]
    if reading.resamples:
        columns.append(column("resamples", [shares.get((i, j), 0.0) for i, j, _, _ in reading.edges], form="percent"))
    return columns


def _resamples(reading: Discovery) -> list[dict[str, Any]]:
    """Pairs by the share of resamples with an edge, and with which marks."""
    rows = sorted(reading.bootstrap, key=lambda row: -row["share"])
    pairs = [(reading.variables[row["i"]], reading.variables[row["j"]]) for row in rows]
    marks = [
        "; ".join(edge_text(*pair, *marks.split(", ")) + f" {share:.0%}" for marks, share in row["marks"].items())
        for row, pair in zip(rows, pairs, strict=True)
    ]
    columns = [
        column("pair", [f"{first} – {second}" for first, second in pairs]),
        column("share", [row["share"] for row in rows], form="percent"),
        column("edges", marks),
    ]
    title = f"Pairs that are adjacent in {reading.resamples} resamples"
    return [{"type": "table", "title": title, "columns": columns}] if rows else []
