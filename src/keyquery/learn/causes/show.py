"""Causal graphs over tokens in the terminal, as a figure and as a page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from keyquery.learn.causes.causes import Causes
from keyquery.learn.causes.show_explanation import explained
from keyquery.learn.discovery.show import Drawn, edge_lines, edge_table, plain_table, tests_note
from keyquery.pages.components import column
from keyquery.pages.rings import MEANS, Ring, kind_of, ring_of
from keyquery.pages.tables import Text
from keyquery.support.printable import counted


def facts_of(reading: Causes) -> list[str]:
    """How the graphs were found, as short texts."""
    layer, several = reading.graphs[0]["layer"], len(reading.graphs)
    facts = [] if layer is None else [f"layer {layer}"]
    facts += [f"{several} heads" if several > 1 else f"head {reading.graphs[0]['head']}"]
    facts += [f"{len(reading.nodes)} of {len(reading.tokens)} tokens", f"{reading.method} at level {reading.alpha:g}"]
    facts += [f"{reading.samples:g} samples ({reading.provenance.get('samples', '')})", f"{reading.tests:,} tests"]
    return facts + (["no token causes an earlier one"] if reading.causal else [])


def lines(reading: Causes) -> list[Any]:
    """Title, edges (the consensus of several heads), a row per head, and the explanation if there is one."""
    several, layer = len(reading.graphs), reading.graphs[0]["layer"]
    where = "" if layer is None else f", layer {layer}"
    title = f"{reading.model['name']}{where}: {counted(several, 'head')}, {counted(len(reading.nodes), 'token')}"
    nodes = " ".join(f"{node}:{reading.tokens[node]}" for node in reading.nodes)
    lines: list[Any] = [Text(title, style="bold"), ", ".join(facts_of(reading)), Text(nodes, style="dim"), ""]
    heads = {(row["i"], row["j"]): row["heads"] for row in reading.consensus()}
    edges = sorted(reading.edges, key=lambda edge: -heads.get(edge[:2], 0)) if several > 1 else reading.edges
    extra = {"i": [str(i) for i, *_ in edges], "j": [str(j) for _, j, *_ in edges]}
    if several > 1:
        extra["heads"] = [f"{heads[i, j]} of {several}" for i, j, *_ in edges]
    lines += edge_lines(reading.tokens, edges, extra, "tokens")
    if several > 1:
        lines += ["", _head_table(reading)]
    if reading.explanation is not None:
        lines += ["", Text(explained(reading.explanation, dict(enumerate(reading.tokens))), style="bold")]
    return lines


def _head_table(reading: Causes) -> Any:
    table = plain_table([], ["head", "edges", *MEANS, "tests", "iterations"])
    for index, graph in enumerate(reading.graphs):
        kinds = Counter(kind_of(edge[2], edge[3]) for edge in reading.edges_of(index))
        counts = [kinds.total(), *(kinds[kind] for kind in MEANS)]
        rounds = f"{graph['rounds']}" + ("" if graph["done"] else ", stopped early")
        table.add_row(str(graph["head"]), *map(str, counts), f"{graph['tests']:,}", rounds)
    return table


def ring(reading: Causes, head: int | None = None) -> Ring:
    """The panel of a head; by default that of the only graph, or of the consensus of several."""
    several, names = len(reading.graphs), {node: reading.tokens[node] for node in reading.nodes}
    if head is None and several > 1:
        agree = {(row["i"], row["j"]): row["heads"] for row in reading.consensus()}
        note = f"{len(reading.edges)} edges shared by at least half of the heads"
        shares = {pair: (heads / several, f" in {heads} of {several} heads") for pair, heads in agree.items()}
        return ring_of(names, reading.edges, f"consensus of {several} heads", note, shares, strong(reading))
    index = 0 if head is None else reading.index_of(head)
    graph, edges = reading.graphs[index], reading.edges_of(index)
    layer = "" if graph["layer"] is None else f"layer {graph['layer']}, "
    note = f"{len(edges)} edges, {tests_note(graph['tests'], graph['done'])}"
    return ring_of(names, edges, f"{layer}head {graph['head']}", note, {}, strong(reading))


def strong(reading: Causes) -> dict[int, str]:
    """Tokens to highlight if a prediction was explained: its "target", and each "cause" of it."""
    explanation = reading.explanation or {"sets": []}
    nodes = {node: "cause" for tokens in explanation["sets"] for node in tokens}
    return {**nodes, explanation["target"]: "target"} if reading.explanation else nodes


def drawn(reading: Causes, head: int | None = None) -> Drawn:
    """One head, or the consensus and then each head."""
    heads = [graph["head"] for graph in reading.graphs]
    panels = [ring(reading, number) for number in (head, *(heads if head is None and len(heads) > 1 else ()))]
    edges = [edge for index in range(len(heads)) for edge in reading.edges_of(index)]
    name = str(reading.model["name"])
    return Drawn(panels, edges, name, f"Causal graph over {len(reading.nodes)} tokens, from the attention of {name}")


def svg(reading: Causes) -> str:
    """All panels as one SVG, for light and dark backgrounds."""
    return drawn(reading).svg()


def graph_figure(reading: Causes, pyplot: Any, head: int | None = None) -> Any:
    """A panel for the consensus and one per head; with `head`, only that head."""
    return drawn(reading, head).figure(pyplot)


FIGURES = {"graphs": graph_figure}


def page(reading: Causes) -> str:
    """The text with its graph, each head, and a table of all edges."""
    known, nodes, several = strong(reading), set(reading.nodes), len(reading.graphs)
    words = [[token, str(i) if i in nodes else None, known.get(i, "")] for i, token in enumerate(reading.tokens)]
    graph: dict[str, Any] = {
        "title": "The text and its graph",
        "note": "click a token for its edges",
        "noun": "position",
    }
    rows = sorted(reading.agreement(), key=lambda row: -row["heads"])
    edges = [(row["i"], row["j"], row["mark_i"], row["mark_j"]) for row in rows]
    columns = [column(end, [row[end] for row in rows]) for end in ("i", "j")]
    columns += [column(f"of {several} heads", [row["heads"] for row in rows])] if several > 1 else []
    table = edge_table("All edges", reading.tokens, edges, *columns, top=16)
    facts, graph["words"] = " · ".join(facts_of(reading)), words
    return drawn(reading).page("causes", facts, [_sentence(reading)], graph, [table], reading.provenance)


def _sentence(reading: Causes) -> str:
    """What a prediction depends on, or how many edges there are."""
    if reading.explanation is not None:
        return explained(reading.explanation, dict(enumerate(reading.tokens)))
    which = f" that at least half of {len(reading.graphs)} heads share" if len(reading.graphs) > 1 else ""
    edges = f"{counted(len(reading.edges), 'edge')}{which} between {counted(len(reading.nodes), 'token')}."
    return edges if reading.edges else "No edges."
