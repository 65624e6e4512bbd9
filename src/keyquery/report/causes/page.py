"""Causal graphs as a self-contained HTML page: the consensus, each head, and a table of all edges."""

from __future__ import annotations

from html import escape

from keyquery.instruments.causes.causes import Causes
from keyquery.pages.document import document
from keyquery.report.causes import svg as graphs
from keyquery.report.causes.layout import MEANS, kind_of, kinds, ring, strong, written


def graph_page(reading: Causes) -> str:
    """The page; it works without its script, which only highlights the edges of a token."""
    return document(
        "graph",
        str(reading.model["name"]),
        ("graph.js",),
        kind="causes",
        own_style=graphs.STYLE,
        facts=escape(_facts(reading)),
        words=_words(reading),
        legend=legend(kinds(reading), "tokens"),
        graph=graphs.inline(ring(reading)),
        explained=_explained(reading),
        table=_table(reading),
        heads=_heads(reading),
    )


def _facts(reading: Causes) -> str:
    layer, several = reading.graphs[0]["layer"], len(reading.graphs)
    facts = [] if layer is None else [f"layer {layer}"]
    facts += [f"{several} heads" if several > 1 else f"head {reading.graphs[0]['head']}"]
    facts += [f"{len(reading.nodes)} of {len(reading.tokens)} tokens", f"{reading.method} at level {reading.alpha:g}"]
    facts += [f"{reading.samples:g} samples ({reading.provenance.get('samples', '')})", f"{reading.tests:,} tests"]
    facts += ["no token causes an earlier one"] if reading.causal else []
    return " · ".join(facts)


def _words(reading: Causes) -> str:
    """The text, with its nodes as buttons that highlight their edges."""
    nodes, known = set(reading.nodes), strong(reading)
    parts = []
    for place, token in enumerate(reading.tokens):
        word = escape(token)
        if place not in nodes:
            parts.append(f'<span class="muted">{word}</span>')
        else:
            kind = f" {known[place]}" if place in known else ""
            parts.append(f'<button class="word{kind}" data-node="{place}" title="position {place}">{word}</button>')
    return " ".join(parts)


def legend(present: list[str], nodes: str) -> str:
    """The legend of the `present` kinds of edges between `nodes`."""
    if not present:
        return f"No edges: all {nodes} are independent of each other."
    svg = '<svg class="graph" viewBox="0 0 40 14" aria-hidden="true">'
    keys = (f"{svg}{graphs.key_svg(kind, 0, 11)}</svg>{MEANS[kind]}" for kind in present)
    return " ".join(f'<span class="key">{key}</span>' for key in keys)


def _explained(reading: Causes) -> str:
    explanation = reading.explanation
    if explanation is None:
        return ""

    def word(place: int) -> str:
        return f"<b>{escape(reading.tokens[place])}</b>"

    target = word(explanation["target"])
    if not explanation["pool"]:
        return f"<p>No token is connected to {target}: there is no set to mask.</p>"
    if not explanation["calls"]:
        near = ", ".join(word(place) for place in explanation["pool"]) or "none"
        return f"<p>Connected to {target}, nearest first: {near}. The model has no LM head to test predictions.</p>"
    sets = "; ".join(" + ".join(map(word, tokens)) for tokens in explanation["sets"])
    none = f"depends on none of the tested sets of up to {explanation['largest']} tokens"
    result = f"depends on {sets}" if sets else none
    target += f" (the text has {escape(explanation['replaced'])})" if explanation.get("replaced") else ""
    return f"<p>The prediction {target} {result}. This took {explanation['calls']} model queries.</p>"


def _table(reading: Causes) -> str:
    several = len(reading.graphs)
    agree = {(row["i"], row["j"]): row["heads"] for row in reading.agreement()}
    rows = [
        (row["i"], row["j"], row["mark_i"], row["mark_j"])
        for row in sorted(reading.agreement(), key=lambda row: -row["heads"])
    ]
    names = ["edge", "meaning", "i", "j", *(["heads"] if several > 1 else [])]
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    body = ""
    for i, j, at_i, at_j in rows:
        cells = [written(reading, i, j, at_i, at_j), MEANS[kind_of(at_i, at_j)], str(i), str(j)]
        cells += [f"{agree[i, j]} of {several}"] if several > 1 else []
        body += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return f'<table class="edges"><thead>{head}</thead><tbody>{body}</tbody></table>' if rows else ""


def _heads(reading: Causes) -> str:
    if len(reading.graphs) == 1:
        return ""
    panels = "".join(graphs.inline(ring(reading, graph["head"])) for graph in reading.graphs)
    return f'<h2>Each head</h2><div class="rings">{panels}</div>'
