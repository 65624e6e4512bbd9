"""Causal graphs over tokens in the terminal, as a figure and as a page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from keyquery.learn.causes.causes import Causes
from keyquery.learn.causes.show_explanation import set_lines
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

ORDERED = ", no token causes an earlier one"
LISTED = 40  # edges that are shown


def lines(reading: Causes) -> list[Any]:
    """Title, edges (the consensus of several heads), a row per head, and the explanation if there is one."""
    several = len(reading.graphs)
    layer = reading.graphs[0]["layer"]
    where = "" if layer is None else f", layer {layer}"
    origin = reading.provenance["samples"]
    title = f"{reading.model['name']}{where}: {several} head{'s' if several > 1 else ''}, {_tokens(len(reading.nodes))}"
    facts = (
        f"{reading.method}, level {reading.alpha:g}, {reading.samples:g} samples ({origin}), {reading.tests:,} tests"
        f"{ORDERED if reading.causal else ''}"
    )
    lines: list[Any] = [Text(title, style="bold"), facts, Text(_numbered(reading), style="dim"), ""]
    lines += [_edges(reading), *_left_out(reading)]
    if several > 1:
        lines += ["", _head_table(reading)]
    if reading.explanation is not None:
        lines += ["", *_explained_lines(reading)]
    kinds = {kind_of(edge[2], edge[3]) for edge in reading.edges}
    if kinds:
        lines += ["", Text("; ".join(f"{kind} {MEANS[kind]}" for kind in MEANS if kind in kinds), style="dim")]
    return lines


def _numbered(reading: Causes) -> str:
    nodes = set(reading.nodes)
    return " ".join(f"{place}:{token}" for place, token in enumerate(reading.tokens) if place in nodes)


def _edges(reading: Causes) -> Any:
    rows = sorted(reading.consensus(), key=lambda row: -row["heads"]) if len(reading.graphs) > 1 else []
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("i", "j", "edge", *(["heads"] if rows else [])):
        table.add_column(name, justify="left" if name == "edge" else "right", no_wrap=True)
    heads = {(row["i"], row["j"]): row["heads"] for row in rows}
    edges = sorted(reading.edges, key=lambda edge: -heads.get(edge[:2], 0))
    for edge in edges[:LISTED]:
        agree = [f"{heads[edge[:2]]} of {len(reading.graphs)}"] if rows else []
        table.add_row(str(edge[0]), str(edge[1]), Text(written(reading, *edge)), *agree)
    return table if edges else "No edges: all tokens are independent of each other."


def _left_out(reading: Causes) -> list[str]:
    count = len(reading.edges)
    return [f"The first {LISTED} of {count} edges; --json, --csv or --html for all."] if count > LISTED else []


def _head_table(reading: Causes) -> Any:
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("head", "edges", *MEANS, "tests", "iterations"):
        table.add_column(name, justify="right")
    for index, graph in enumerate(reading.graphs):
        counts = Counter(kind_of(edge[2], edge[3]) for edge in reading.edges_of(index))
        rounds = f"{graph['rounds']}" + ("" if graph["done"] else ", stopped early")
        table.add_row(
            str(graph["head"]),
            str(counts.total()),
            *(str(counts[kind]) for kind in MEANS),
            f"{graph['tests']:,}",
            rounds,
        )
    return table


def _explained_lines(reading: Causes) -> list[Any]:
    return set_lines(dict(reading.explanation or {}), list(reading.tokens))


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def written(reading: Causes, i: int, j: int, at_i: str, at_j: str) -> str:
    """An edge as text, such as "blue o→ whale"; an edge that points back is reversed."""
    return edge_text(reading.tokens[i], reading.tokens[j], at_i, at_j)


def ring(reading: Causes, head: int | None = None) -> Ring:
    """The panel of a head; by default that of the only graph, or of the consensus of several."""
    several = len(reading.graphs)
    names = {node: reading.tokens[node] for node in reading.nodes}
    if head is None and several > 1:
        agree = {(row["i"], row["j"]): row["heads"] for row in reading.consensus()}
        note = f"{len(reading.edges)} edges shared by at least half of the heads"
        shares = {pair: (heads / several, f" in {heads} of {several} heads") for pair, heads in agree.items()}
        return ring_of(names, reading.edges, f"consensus of {several} heads", note, shares, strong(reading))
    index = 0 if head is None else reading.index_of(head)
    graph, edges = reading.graphs[index], reading.edges_of(index)
    place = "" if graph["layer"] is None else f"layer {graph['layer']}, "
    note = f"{len(edges)} edges, {graph['tests']:,} tests" + ("" if graph["done"] else ", stopped early")
    return ring_of(names, edges, f"{place}head {graph['head']}", note, {}, strong(reading))


def rings(reading: Causes, head: int | None = None) -> list[Ring]:
    """The panels of a figure: one head, or the consensus and then each head."""
    if head is not None or len(reading.graphs) == 1:
        return [ring(reading, head)]
    return [ring(reading), *(ring(reading, graph["head"]) for graph in reading.graphs)]


def kinds(reading: Causes) -> list[str]:
    """The kinds of edges that occur in any head, in the order of the legend."""
    return kinds_of([edge for index in range(len(reading.graphs)) for edge in reading.edges_of(index)])


def strong(reading: Causes) -> dict[int, str]:
    """Tokens to highlight if a prediction was explained: its "target", and each "cause" of it."""
    explanation = reading.explanation or {}
    nodes = {node: "cause" for tokens in explanation.get("sets", []) for node in tokens}
    return {**nodes, explanation["target"]: "target"} if explanation else nodes


def svg(reading: Causes) -> str:
    """All panels as one SVG, for light and dark backgrounds."""
    label = f"Causal graph over {len(reading.nodes)} tokens, from the attention of {reading.model['name']}"
    return drawing(rings(reading), kinds(reading), str(reading.model["name"]), label)


def graph_figure(reading: Causes, pyplot: Any, head: int | None = None) -> Any:
    """A panel for the consensus and one per head; with `head`, only that head."""
    return panels_figure(rings(reading, head), kinds(reading), str(reading.model["name"]), pyplot)


FIGURES = {"graphs": graph_figure}


def page(reading: Causes) -> str:
    """The text with its graph, each head, and a table of all edges."""
    panels = rings(reading)
    keys = kinds(reading)
    figures = [inline(panel) for panel in panels] + [key_inline(kind) for kind in keys]
    known, nodes = strong(reading), set(reading.nodes)
    words = [[token, str(i) if i in nodes else None, known.get(i, "")] for i, token in enumerate(reading.tokens)]
    graph = {"type": "graph", "noun": "position", "words": words, "legend": [[kind, MEANS[kind]] for kind in keys]}
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": _sentences(reading)},
        {
            **graph,
            "place": "seven",
            "title": "The text and its graph",
            "note": "click a token for its edges",
            "pictures": [0],
        },
        _edge_table(reading),
    ]
    if len(panels) > 1:
        rest = list(range(1, len(panels)))
        blocks.append({"type": "graph", "title": "Each head", "words": [], "legend": [], "pictures": rest})
    name, tabs = str(reading.model["name"]), [{"blocks": blocks}]
    notes = versioned([], reading.provenance)
    return document(name, "causes", tabs, _facts(reading), notes, figures, style=STYLE)


def _facts(reading: Causes) -> str:
    layer, several = reading.graphs[0]["layer"], len(reading.graphs)
    facts = [] if layer is None else [f"layer {layer}"]
    facts += [f"{several} heads" if several > 1 else f"head {reading.graphs[0]['head']}"]
    facts += [f"{len(reading.nodes)} of {len(reading.tokens)} tokens", f"{reading.method} at level {reading.alpha:g}"]
    facts += [f"{reading.samples:g} samples ({reading.provenance.get('samples', '')})", f"{reading.tests:,} tests"]
    facts += ["no token causes an earlier one"] if reading.causal else []
    return " · ".join(facts)


def _sentences(reading: Causes) -> list[str]:
    """What a prediction depends on, or how many edges there are."""
    explanation, several = reading.explanation, len(reading.graphs)
    if explanation is None:
        edges = counted(len(reading.edges), "edge")
        which = f" that at least half of {several} heads share" if several > 1 else ""
        return [f"{edges}{which} between {counted(len(reading.nodes), 'token')}." if reading.edges else "No edges."]
    names = reading.tokens
    target = names[explanation["target"]]
    if not explanation["pool"]:
        return [f"No token is connected to {target}: there is no set to mask."]
    if not explanation["calls"]:
        near = ", ".join(names[place] for place in explanation["pool"])
        return [f"Connected to {target}, nearest first: {near}. The model has no LM head to test predictions."]
    sets = "; ".join(" + ".join(names[place] for place in tokens) for tokens in explanation["sets"])
    none = f"depends on none of the tested sets of up to {explanation['largest']} tokens"
    target += f" (the text has {explanation['replaced']})" if explanation.get("replaced") else ""
    result = f"depends on {sets}" if sets else none
    return [f"The prediction {target} {result}.", f"This took {explanation['calls']} model queries."]


def _edge_table(reading: Causes) -> dict[str, Any]:
    rows = sorted(reading.agreement(), key=lambda row: -row["heads"])
    marks = [(row["mark_i"], row["mark_j"]) for row in rows]
    columns = [
        column("edge", [written(reading, row["i"], row["j"], *mark) for row, mark in zip(rows, marks, strict=True)]),
        column("meaning", [MEANS[kind_of(*mark)] for mark in marks]),
        column("i", [row["i"] for row in rows]),
        column("j", [row["j"] for row in rows]),
    ]
    if (several := len(reading.graphs)) > 1:
        columns.append(column(f"of {several} heads", [row["heads"] for row in rows]))
    return {"type": "table", "place": "five", "title": "All edges", "columns": columns, "top": 16}
