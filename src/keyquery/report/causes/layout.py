"""Causal graphs as they are drawn: tokens in a ring, in the order they are read, edges between them with marks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyquery.instruments.causes.causes import Causes
from keyquery.report.kit.colours import EDGES

# What is said of an edge, by its marks in the order of the alphabet.
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
    "o→": "cause, or hidden cause of both",
    "↔": "hidden cause of both",
    "o–o": "not known",
    "–": "selected by both",
}
LEAST, APART = 140.0, 24.0  # the radius of a ring, and how far its tokens stand apart
BEND = 0.55  # how far edges turn inwards
LONGEST = 16  # signs of a token that are shown
MANY = 45  # edges, beyond which lines get finer
SIGN = 6.8  # room that a sign of a token takes


@dataclass(frozen=True)
class Arc:
    """An edge as it is drawn: a curve of three points, the mark at each end, its kind, how wide it is."""

    i: int
    j: int
    points: tuple[tuple[float, float], ...]
    marks: tuple[str, str]
    kind: str
    width: float
    title: str


@dataclass(frozen=True)
class Tip:
    """The end of an edge: where its line stops before the token, and the corners or the middle of its mark."""

    stop: tuple[float, float]
    corners: tuple[tuple[float, float], ...] = ()
    middle: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ring:
    """One panel: where each token stands (the middle is 0, 0; y downwards), its angle, and the edges."""

    title: str
    note: str
    radius: float
    half: float  # of the panel's width
    places: dict[int, tuple[float, float, float]]
    arcs: list[Arc]


def kind_of(at_i: str, at_j: str) -> str:
    """What an edge is, whichever way it points.

    >>> kind_of("tail", "arrow"), kind_of("arrow", "circle")
    ('→', 'o→')
    """
    one, other = sorted((at_i, at_j))
    return KINDS[one, other]


def written(reading: Causes, i: int, j: int, at_i: str, at_j: str) -> str:
    """An edge in words, such as "blue o→ whale"; one that points back is turned round."""
    if at_i == "arrow" and at_j != "arrow":
        i, j, at_i, at_j = j, i, at_j, at_i
    return f"{reading.tokens[i]} {kind_of(at_i, at_j)} {reading.tokens[j]}"


def ring(reading: Causes, head: int | None = None) -> Ring:
    """The panel of a head; without one, that of the only graph or of the consensus of several."""
    count = len(reading.nodes)
    radius = max(LEAST, APART * count / (2 * math.pi))
    places = {}
    for index, node in enumerate(reading.nodes):
        angle = 2 * math.pi * (index + 0.5) / count - math.pi / 2
        places[node] = (radius * math.cos(angle), radius * math.sin(angle), angle)
    several = len(reading.graphs)
    if head is None and several > 1:
        title, shares = f"{several} heads together", {(row["i"], row["j"]): row["heads"] for row in reading.consensus()}
        edges, note = reading.edges, f"{len(reading.edges)} edges that at least half of the heads have"
    else:
        index = 0 if head is None else reading.index_of(head)
        graph = reading.graphs[index]
        place = "" if graph["layer"] is None else f"layer {graph['layer']}, "
        title, shares = f"{place}head {graph['head']}", {}
        edges = reading.edges_of(index)
        note = f"{len(edges)} edges, {graph['tests']:,} tests" + ("" if graph["done"] else ", cut short")
    fine = min(1.0, math.sqrt(MANY / max(len(edges), 1)))
    arcs = []
    for i, j, at_i, at_j in edges:
        (x1, y1, _), (x2, y2, _) = places[i], places[j]
        keep = (1 - BEND * min(1.0, math.hypot(x2 - x1, y2 - y1) / radius)) / 2  # neighbours need no detour
        middle = ((x1 + x2) * keep, (y1 + y2) * keep)
        agree = shares.get((i, j), several)
        told = written(reading, i, j, at_i, at_j) + (f" in {agree} of {several} heads" if shares else "")
        arcs.append(
            Arc(
                i,
                j,
                ((x1, y1), middle, (x2, y2)),
                (at_i, at_j),
                kind_of(at_i, at_j),
                fine * (0.7 + 1.1 * agree / several),
                told,
            )
        )
    half = radius + 18 + SIGN * max(len(short(reading.tokens[node])) for node in reading.nodes)
    return Ring(title, note, radius, max(half, 150.0), places, arcs)


def rings(reading: Causes, head: int | None = None) -> list[Ring]:
    """The panels of a picture: a head, or the consensus and then each head."""
    if head is not None or len(reading.graphs) == 1:
        return [ring(reading, head)]
    return [ring(reading), *(ring(reading, graph["head"]) for graph in reading.graphs)]


def kinds(reading: Causes) -> list[str]:
    """The kinds of edges that any head has, in the order of the legend."""
    there = {kind_of(edge[2], edge[3]) for index in range(len(reading.graphs)) for edge in reading.edges_of(index)}
    return [kind for kind in EDGES if kind in there]


def tips(arc: Arc) -> list[Tip]:
    """Both ends of an edge: a tail is the line itself, an arrowhead has three corners, a circle a middle."""
    (x1, y1), (mx, my), (x2, y2) = arc.points
    found = []
    for (x, y), mark in (((x1, y1), arc.marks[0]), ((x2, y2), arc.marks[1])):
        long = math.hypot(mx - x, my - y) or 1.0
        dx, dy = (mx - x) / long, (my - y) / long
        bx, by = x + 5 * dx, y + 5 * dy  # beside the dot
        tx, ty = bx + 8 * dx, by + 8 * dy
        if mark == "tail":
            found.append(Tip((bx, by)))
        elif mark == "circle":
            found.append(Tip((bx + 6 * dx, by + 6 * dy), middle=(bx + 3 * dx, by + 3 * dy)))
        else:
            sides = (tx - 3.4 * dy, ty + 3.4 * dx), (tx + 3.4 * dy, ty - 3.4 * dx)
            found.append(Tip((tx, ty), corners=((bx, by), *sides)))
    return found


def short(token: str, most: int = LONGEST) -> str:
    """A token, or a name, as its label says it: what cannot be printed replaced, and cut to so many letters.

    >>> short("a long name", 6)
    'a lon…'
    """
    token = "".join(sign if sign.isprintable() else "�" for sign in token)
    return token if len(token) <= most else token[: most - 1] + "…"


def strong(reading: Causes) -> dict[int, str]:
    """Tokens that stand out where a prediction was explained: its "target", and each "cause" of it."""
    said = reading.explanation or {}
    found = {node: "cause" for one in said.get("sets", []) for node in one}
    return {**found, said["target"]: "target"} if said else found
