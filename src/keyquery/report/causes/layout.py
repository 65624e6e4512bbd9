"""Layout of causal graphs: tokens on a ring, in reading order, with marked edges between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keyquery.instruments.causes.causes import Causes
from keyquery.instruments.causes.discovery import Edge
from keyquery.pages.colours import EDGES

# The kind of an edge by its two marks, in alphabetical order.
KINDS = {
    ("arrow", "arrow"): "↔",
    ("arrow", "circle"): "o→",
    ("arrow", "tail"): "→",
    ("circle", "circle"): "o–o",
    ("circle", "tail"): "–",
    ("tail", "tail"): "–",
}
MEANS = {
    "→": "cause",
    "o→": "cause, or latent confounder",
    "↔": "latent confounder",
    "o–o": "undetermined",
    "–": "selection bias",
}
LEAST, APART = 140.0, 24.0  # minimum radius of a ring, and distance between its tokens
BEND = 0.55  # how far edges bend inwards
LONGEST = 16  # characters of a token that are shown
MANY = 45  # edges above which lines get thinner
SIGN = 6.8  # width of a character of a token


@dataclass(frozen=True)
class Arc:
    """An edge to draw: a curve of three points, the mark at each end, its kind and its width."""

    i: int
    j: int
    points: tuple[tuple[float, float], ...]
    marks: tuple[str, str]
    kind: str
    width: float
    title: str


@dataclass(frozen=True)
class Tip:
    """The end of an edge: where its line stops before the token, and the corners or the centre of its mark."""

    stop: tuple[float, float]
    corners: tuple[tuple[float, float], ...] = ()
    middle: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ring:
    """One panel: the position of each token (the centre is 0, 0; y downwards), its angle, and the edges."""

    title: str
    note: str
    radius: float
    half: float  # of the panel's width
    places: dict[int, tuple[float, float, float]]
    arcs: list[Arc]
    names: dict[int, str]
    strong: dict[int, str]  # nodes to highlight, as "target" or "cause"


def kind_of(at_i: str, at_j: str) -> str:
    """The kind of an edge, regardless of its direction."""
    first, second = sorted((at_i, at_j))
    return KINDS[first, second]


def written(reading: Causes, i: int, j: int, at_i: str, at_j: str) -> str:
    """An edge as text, such as "blue o→ whale"; an edge that points back is reversed."""
    return edge_text(reading.tokens[i], reading.tokens[j], at_i, at_j)


def edge_text(first: str, second: str, at_first: str, at_second: str) -> str:
    """An edge between two names as text."""
    if at_first == "arrow" and at_second != "arrow":
        first, second, at_first, at_second = second, first, at_second, at_first
    return f"{first} {kind_of(at_first, at_second)} {second}"


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


def ring_of(
    names: dict[int, str],
    edges: Sequence[Edge],
    title: str,
    note: str,
    shares: Mapping[tuple[int, int], tuple[float, str]],
    highlighted: dict[int, str],
) -> Ring:
    """A panel of named nodes; `shares` are the weight of an edge and what its tooltip adds. Default: 1 and nothing."""
    radius = max(LEAST, APART * len(names) / (2 * math.pi))
    places = {}
    for index, node in enumerate(names):
        angle = 2 * math.pi * (index + 0.5) / len(names) - math.pi / 2
        places[node] = (radius * math.cos(angle), radius * math.sin(angle), angle)
    fine = min(1.0, math.sqrt(MANY / max(len(edges), 1)))
    arcs = []
    for i, j, at_i, at_j in edges:
        (x1, y1, _), (x2, y2, _) = places[i], places[j]
        keep = (1 - BEND * min(1.0, math.hypot(x2 - x1, y2 - y1) / radius)) / 2  # neighbours need no detour
        middle = ((x1 + x2) * keep, (y1 + y2) * keep)
        share, addition = shares.get((i, j), (1.0, ""))
        curve, label = ((x1, y1), middle, (x2, y2)), edge_text(names[i], names[j], at_i, at_j) + addition
        arcs.append(Arc(i, j, curve, (at_i, at_j), kind_of(at_i, at_j), fine * (0.7 + 1.1 * share), label))
    half = radius + 18 + SIGN * max(len(short(name)) for name in names.values())
    return Ring(title, note, radius, max(half, 150.0), places, arcs, names, highlighted)


def rings(reading: Causes, head: int | None = None) -> list[Ring]:
    """The panels of a figure: one head, or the consensus and then each head."""
    if head is not None or len(reading.graphs) == 1:
        return [ring(reading, head)]
    return [ring(reading), *(ring(reading, graph["head"]) for graph in reading.graphs)]


def kinds(reading: Causes) -> list[str]:
    """The kinds of edges that occur in any head, in the order of the legend."""
    return kinds_of([edge for index in range(len(reading.graphs)) for edge in reading.edges_of(index)])


def kinds_of(edges: Sequence[Edge]) -> list[str]:
    """The kinds of some edges, in the order of the legend."""
    present = {kind_of(at_i, at_j) for _, _, at_i, at_j in edges}
    return [kind for kind in EDGES if kind in present]


def tips(arc: Arc) -> list[Tip]:
    """Both ends of an edge: a tail is the line itself, an arrowhead has three corners, a circle a centre."""
    (x1, y1), (mx, my), (x2, y2) = arc.points
    ends = []
    for (x, y), mark in (((x1, y1), arc.marks[0]), ((x2, y2), arc.marks[1])):
        long = math.hypot(mx - x, my - y) or 1.0
        dx, dy = (mx - x) / long, (my - y) / long
        bx, by = x + 5 * dx, y + 5 * dy  # beside the dot
        tx, ty = bx + 8 * dx, by + 8 * dy
        if mark == "tail":
            ends.append(Tip((bx, by)))
        elif mark == "circle":
            ends.append(Tip((bx + 6 * dx, by + 6 * dy), middle=(bx + 3 * dx, by + 3 * dy)))
        else:
            sides = (tx - 3.4 * dy, ty + 3.4 * dx), (tx + 3.4 * dy, ty - 3.4 * dx)
            ends.append(Tip((tx, ty), corners=((bx, by), *sides)))
    return ends


def short(token: str, most: int = LONGEST) -> str:
    """A token or a name as a label: unprintable characters replaced, and cut to `most` characters."""
    token = "".join(sign if sign.isprintable() else "�" for sign in token)
    return token if len(token) <= most else token[: most - 1] + "…"


def strong(reading: Causes) -> dict[int, str]:
    """Tokens to highlight if a prediction was explained: its "target", and each "cause" of it."""
    explanation = reading.explanation or {}
    nodes = {node: "cause" for tokens in explanation.get("sets", []) for node in tokens}
    return {**nodes, explanation["target"]: "target"} if explanation else nodes
