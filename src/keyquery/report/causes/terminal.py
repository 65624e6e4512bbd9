"""Causal graphs in the terminal: the consensus of heads, each head, and the explanation of a prediction."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.causes.causes import Causes
from keyquery.instruments.causes.explain import Explanation
from keyquery.report.causes.layout import MEANS, kind_of, written

ORDERED = ", no token causes an earlier one"
MOST = 40  # edges that are shown


def causes_lines(reading: Causes) -> list[Any]:
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
        lines += ["", _heads(reading)]
    if reading.explanation is not None:
        lines += ["", *_explained(reading)]
    kinds = {kind_of(edge[2], edge[3]) for edge in reading.edges}
    if kinds:
        lines += ["", Text("; ".join(f"{kind} {MEANS[kind]}" for kind in MEANS if kind in kinds), style="dim")]
    return lines


def explanation_lines(reading: Explanation) -> list[Any]:
    """The sets of tokens, and the number of model queries."""
    return [*_sets(reading.to_dict(), list(reading.tokens) or None)]


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
    for edge in edges[:MOST]:
        agree = [f"{heads[edge[:2]]} of {len(reading.graphs)}"] if rows else []
        table.add_row(str(edge[0]), str(edge[1]), Text(written(reading, *edge)), *agree)
    return table if edges else "No edges: all tokens are independent of each other."


def _left_out(reading: Causes) -> list[str]:
    count = len(reading.edges)
    return [f"The first {MOST} of {count} edges; --json, --csv or --html for all."] if count > MOST else []


def _heads(reading: Causes) -> Table:
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


def _explained(reading: Causes) -> list[Any]:
    return _sets(dict(reading.explanation or {}), list(reading.tokens))


def _sets(explanation: dict[str, Any], tokens: list[str] | None) -> list[Any]:
    names = tokens or {place: str(place) for place in (explanation["target"], *explanation["pool"])}
    queries = f"{explanation['calls']} model queries"
    target = f"{explanation['target']}:{names[explanation['target']]}"
    replaced = explanation.get("replaced")
    prediction = target + (f" (predicted; the text has {replaced})" if replaced else "")
    if not explanation["pool"]:
        return [Text(f"No token is connected to {target}: there is no set to mask.")]
    if not explanation["calls"]:
        near = " ".join(f"{place}:{names[place]}" for place in explanation["pool"]) or "none"
        return [Text(f"Connected to {target}, nearest first: {near}. The model has no LM head to test predictions.")]
    if not explanation["sets"]:
        most = explanation["largest"]
        return [Text(f"None of the tested sets of up to {most} tokens changes {prediction}; {queries}.")]
    each = "; ".join(" + ".join(f"{place}:{names[place]}" for place in nodes) for nodes in explanation["sets"])
    return [Text(f"{prediction} depends on: {each} ({queries}).", style="bold")]


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"
