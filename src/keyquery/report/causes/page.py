"""One self-contained HTML page of causal graphs: the consensus, each head, and every edge as a table."""

from __future__ import annotations

from html import escape

from keyquery.instruments.causes.causes import Causes
from keyquery.report.causes import svg as graphs
from keyquery.report.causes.layout import MEANS, kind_of, kinds, ring, strong, written
from keyquery.report.kit.page import document


def graph_page(reading: Causes) -> str:
    """The page; it shows itself without a script, which only picks out a token's edges.

    >>> graph_page(kq.causes(torch.eye(3)))[:15]
    '<!doctype html>'
    """
    return document(
        "graph",
        str(reading.model["name"]),
        ("graph.js",),
        kind="causes",
        own_style=graphs.STYLE,
        facts=escape(_facts(reading)),
        words=_words(reading),
        legend=_legend(reading),
        graph=graphs.inline(ring(reading), reading),
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
    facts += ["no token is a cause of an earlier one"] if reading.causal else []
    return " · ".join(facts)


def _words(reading: Causes) -> str:
    """The text, its nodes as buttons that pick out their edges."""
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


def _legend(reading: Causes) -> str:
    if not kinds(reading):
        return "No edge: all tokens are independent of each other."
    svg = '<svg class="graph" viewBox="0 0 40 14" aria-hidden="true">'
    keys = (f"{svg}{graphs.key_svg(kind, 0, 11)}</svg>{MEANS[kind]}" for kind in kinds(reading))
    return " ".join(f'<span class="key">{key}</span>' for key in keys)


def _explained(reading: Causes) -> str:
    found = reading.explanation
    if found is None:
        return ""

    def word(place: int) -> str:
        return f"<b>{escape(reading.tokens[place])}</b>"

    target = word(found["target"])
    if not found["pool"]:
        return f"<p>Nothing is joined to {target}: there is no set to mask.</p>"
    if not found["calls"]:
        near = ", ".join(word(place) for place in found["pool"]) or "nothing"
        return f"<p>Joined to {target}, nearest first: {near}. The model has no head to ask what it predicts.</p>"
    sets = "; ".join(" + ".join(map(word, one)) for one in found["sets"])
    said = f"rests on {sets}" if sets else f"rests on no set of up to {found['largest']} tokens that was tried"
    target += f" (the text has {escape(found['replaced'])})" if found.get("replaced") else ""
    return f"<p>The prediction {target} {said}. That took {found['calls']} calls of the model.</p>"


def _table(reading: Causes) -> str:
    several = len(reading.graphs)
    agree = {(row["i"], row["j"]): row["heads"] for row in reading.agreement()}
    rows = [
        (row["i"], row["j"], row["mark_i"], row["mark_j"])
        for row in sorted(reading.agreement(), key=lambda row: -row["heads"])
    ]
    names = ["edge", "what it says", "i", "j", *(["heads"] if several > 1 else [])]
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
    panels = "".join(graphs.inline(ring(reading, graph["head"]), reading) for graph in reading.graphs)
    return f'<h2>Each head</h2><div class="rings">{panels}</div>'
