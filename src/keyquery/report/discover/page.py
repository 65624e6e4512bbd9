"""A causal graph over columns as a self-contained HTML page: the graph, the resamples, and a table of all edges."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from keyquery.instruments.discover.discover import Discovery
from keyquery.pages.document import document
from keyquery.report.causes.layout import MEANS, edge_text, kind_of, kinds_of
from keyquery.report.causes.page import legend
from keyquery.report.causes.svg import STYLE, inline
from keyquery.report.discover.figure import panel
from keyquery.report.discover.terminal import facts_of


def discovery_page(reading: Discovery) -> str:
    """The page; it works without its script, which only highlights the edges of a variable."""
    buttons = (
        f'<button class="word" data-node="{node}">{escape(name)}</button>'
        for node, name in enumerate(reading.variables)
    )
    return document(
        "graph",
        reading.name,
        ("graph.js",),
        kind="causal graph",
        own_style=STYLE,
        facts=escape(" · ".join(facts_of(reading))),
        words=" ".join(buttons),
        explained=_knowledge(reading),
        legend=legend(kinds_of(reading.pag().edges()), "variables"),
        graph=inline(panel(reading)),
        table=_edges(reading),
        heads=_resamples(reading),
    )


def _knowledge(reading: Discovery) -> str:
    known = [f"{a} does not cause {b}" for a, b in reading.forbidden] + [f"{a} → {b}" for a, b in reading.required]
    if reading.tiers is not None:
        tiers = sorted(set(reading.tiers))
        pairs = list(zip(reading.variables, reading.tiers, strict=True))
        known.insert(0, "order: " + " | ".join(", ".join(n for n, own in pairs if own == tier) for tier in tiers))
    return f"<p>Background knowledge: {escape('; '.join(known))}.</p>" if known else ""


def _edges(reading: Discovery) -> str:
    rows = [
        (edge_text(reading.variables[i], reading.variables[j], at_i, at_j), MEANS[kind_of(at_i, at_j)])
        for i, j, at_i, at_j in reading.edges
    ]
    return _table(("edge", "meaning"), rows)


def _resamples(reading: Discovery) -> str:
    """Pairs by the share of resamples with an edge, and with which marks."""
    rows = []
    for row in sorted(reading.bootstrap, key=lambda row: -row["share"]):
        first, second = reading.variables[row["i"]], reading.variables[row["j"]]
        marks = (
            edge_text(first, second, *marks.split(", ")) + f" {share:.0%}" for marks, share in row["marks"].items()
        )
        rows.append((f"{first} – {second}", f"{row['share']:.0%}", "; ".join(marks)))
    title = f"<h2>Pairs that are adjacent in {reading.resamples} resamples</h2>"
    return title + _table(("pair", "share", "edges"), rows) if rows else ""


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="edges"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>' if rows else ""
