"""A causal graph over columns in the terminal, as a figure and as a page."""

from __future__ import annotations

from typing import Any

from keyquery.learn.discover.discover import Discovery
from keyquery.learn.discovery.show import Drawn, edge_lines, edge_table, tests_note
from keyquery.pages.components import column
from keyquery.pages.rings import edge_text, ring_of
from keyquery.pages.tables import Text
from keyquery.support.printable import counted


def facts_of(reading: Discovery) -> list[str]:
    """How the graph was found, as short texts."""
    rows = [] if reading.rows is None else [f"{reading.rows:,} rows, level {reading.alpha:g}"]
    rows += [f"{reading.dropped:,} rows with missing values left out"] if reading.dropped else []
    facts = [f"{len(reading.variables)} variables", *rows, f"{reading.method} with {reading.test}"]
    facts += [tests_note(reading.tests, reading.done)]
    facts += [f"{len(set(reading.tiers))} tiers"] if reading.tiers is not None else []
    facts += [f"{len(reading.forbidden)} forbidden"] if reading.forbidden else []
    facts += [f"{len(reading.required)} required"] if reading.required else []
    facts += ["selection bias allowed"] if reading.selection else []
    return facts + ([f"{reading.resamples} resamples"] if reading.resamples else [])


def lines(reading: Discovery) -> list[Any]:
    """Title, facts, edges, and what the kinds of edges mean."""
    edges = reading.pag().edges()
    extra = {"resamples": [f"{share:.0%}" for share in _shares(reading)]} if reading.resamples else {}
    title = [Text(reading.name, style="bold"), Text(", ".join(facts_of(reading))), ""]
    return [*title, *edge_lines(reading.variables, edges, extra, "variables")]


def drawn(reading: Discovery) -> Drawn:
    """Variables on a ring; lines are thinner where few resamples have the edge."""
    edges, shares = reading.pag().edges(), _shares(reading)
    note = f"{len(edges)} edges, {tests_note(reading.tests, reading.done)}"
    of = f"of {reading.resamples} resamples"
    weights = {edge[:2]: (share, f" in {share:.0%} {of}") for edge, share in zip(edges, shares, strict=False)}
    names, title = dict(enumerate(reading.variables)), f"{reading.method} with {reading.test}"
    label = f"Causal graph over the {len(reading.variables)} variables of {reading.name}"
    return Drawn([ring_of(names, edges, title, note, weights, {})], edges, reading.name, label)


def svg(reading: Discovery) -> str:
    """The graph as SVG, for light and dark backgrounds."""
    return drawn(reading).svg()


def graph_figure(reading: Discovery, pyplot: Any) -> Any:
    """The graph as a matplotlib figure."""
    return drawn(reading).figure(pyplot)


FIGURES = {"graph": graph_figure}


def page(reading: Discovery) -> str:
    """The graph over variables, its edges, and how often pairs are adjacent in resamples."""
    edges = reading.pag().edges()
    words = [[name, str(node), ""] for node, name in enumerate(reading.variables)]
    graph = {"title": "The graph", "note": "click a variable for its edges", "noun": "variable", "words": words}
    between = f"{counted(len(edges), 'edge')} between {counted(len(reading.variables), 'variable')}."
    sentence = between if edges else "No edges: all variables are independent of each other."
    columns = [column("resamples", _shares(reading), form="percent")] if reading.resamples else []
    blocks = [edge_table("Edges", reading.variables, edges, *columns), *_resamples(reading)]
    sentences, facts = [sentence, *_knowledge(reading)], " · ".join(facts_of(reading))
    return drawn(reading).page("causal graph", facts, sentences, graph, blocks, reading.provenance)


def _shares(reading: Discovery) -> list[float]:
    """The share of resamples with each edge; empty without resamples."""
    shares = reading.shares()
    return [shares.get((i, j), 0.0) for i, j, *_ in reading.edges] if reading.resamples else []


def _knowledge(reading: Discovery) -> list[str]:
    known = [f"{a} does not cause {b}" for a, b in reading.forbidden] + [f"{a} → {b}" for a, b in reading.required]
    if reading.tiers is not None:
        pairs = list(zip(reading.variables, reading.tiers, strict=True))
        tiers = [", ".join(name for name, number in pairs if number == tier) for tier in sorted(set(reading.tiers))]
        known.insert(0, "order: " + " | ".join(tiers))
    return [f"Background knowledge: {'; '.join(known)}."] if known else []


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
