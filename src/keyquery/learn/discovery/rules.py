"""Zhang's orientation rules R0 to R10 (2008): marks that follow from the separating sets.

A rule proposes marks for circles, all from the same graph; an end with conflicting proposals, which only wrong tests
can cause, keeps its circle. So the result does not depend on the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from keyquery.learn.discovery.knowledge import Knowledge
from keyquery.learn.discovery.pag import Pag, members

Pair = tuple[int, int]


class Separations(NamedTuple):
    """By separated pair i < j, masks of nodes that are no colliders between them, such as a separating set."""

    between: Mapping[Pair, int]
    unsure: Mapping[Pair, int] = {}  # common neighbours on which tests disagree: neither R0 nor R1 applies to them


Proposal = tuple[int, int, str]  # at, other, mark
Rule = Callable[[Pag, Separations], Iterator[Proposal]]


def orient(graph: Pag, separations: Separations, selection: bool, knowledge: Knowledge) -> None:
    """Set every mark that follows: R0; R1–R4; R5–R7 with `selection`; R8–R10."""
    # With tiers, R1–R4 and R8–R10 stay sound and complete (Andrews et al., 2020), with other knowledge sound.
    orient_arrowheads(graph, separations, knowledge)
    if selection:
        _repeat(graph, separations, (_r5, _r6, _r7))
    # New tails imply no arrowheads, unless some were known.
    _repeat(graph, separations, (*(ARROWHEADS if knowledge else ()), _r8, _r9, _r10))


def orient_arrowheads(graph: Pag, separations: Separations, knowledge: Knowledge) -> None:
    """Set all marks to those of background knowledge and R0, then apply R1–R4 until nothing changes."""
    knowledge.mark(graph)
    for node, other, mark in list(_r0(graph, separations)):
        if graph.mark(node, other) == "circle":  # a required tail is not overruled
            graph.put(node, other, mark)
    _repeat(graph, separations, ARROWHEADS)


def _repeat(graph: Pag, separations: Separations, rules: Sequence[Rule]) -> None:
    changed = True
    while changed:
        changed = False
        for rule in rules:
            proposed: dict[tuple[int, int], str] = {}
            for node, other, mark in rule(graph, separations):
                if graph.mark(node, other) == "circle":
                    known = proposed.setdefault((node, other), mark)
                    proposed[node, other] = mark if known == mark else "circle"
            for (node, other), mark in proposed.items():
                if mark != "circle":
                    graph.put(node, other, mark)
                    changed = True


def _apart(graph: Pag, x: int, y: int) -> bool:
    return not graph.adjacent[x] >> y & 1


def _has_apart(graph: Pag, mask: int) -> bool:
    """Whether two of these nodes are not adjacent."""
    return any(mask & ~graph.adjacent[x] & ~(1 << x) for x in members(mask))


def _r0(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A – B – C, A and C not adjacent, B not in their separating set: A *→ B ←* C."""
    for (a, c), between in separations.between.items():
        for b in members(graph.adjacent[a] & graph.adjacent[c] & ~between & ~separations.unsure.get((a, c), 0)):
            yield b, a, "arrow"
            yield b, c, "arrow"


def _r1(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A *→ B o–* C, A and C not adjacent: B → C."""
    for b in range(len(graph)):
        if not graph.arrows[b]:
            continue
        for c in members(graph.circles(b)):
            ends = graph.arrows[b] & ~graph.adjacent[c]
            if any(not separations.unsure.get((min(a, c), max(a, c)), 0) >> b & 1 for a in members(ends)):
                yield b, c, "tail"
                yield c, b, "arrow"


def _r2(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A → B *→ C or A *→ B → C, and A *–o C: A *→ C."""
    for c in range(len(graph)):
        into, parents = graph.arrows[c], graph.parents(c)
        for a in members(graph.circles(c)):
            between = members(graph.adjacent[a] & into)
            if any(graph.arrows[b] >> a & 1 and (graph.tails[a] >> b & 1 or parents >> b & 1) for b in between):
                yield c, a, "arrow"


def _r3(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A *→ B ←* C, A *–o D o–* C, A and C not adjacent, D *–o B: D *→ B."""
    for b in range(len(graph)):
        for d in members(graph.circles(b)):
            if _has_apart(graph, graph.arrows[b] & graph.circles(d)):
                yield b, d, "arrow"


def _r4(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A discriminating path ⟨D, …, A, B, C⟩ for B, and B o–* C: B → C if B separates D and C, else A ↔ B ↔ C."""
    for c in range(len(graph)):
        parents = graph.parents(c)
        for b in members(graph.adjacent[c] if parents else 0):
            if not graph.circles(b) >> c & 1:
                continue
            for a in members(parents & graph.adjacent[b]):
                if not graph.arrows[a] >> b & 1:
                    continue
                for d in _discriminated(graph, a, b, c, parents):
                    if separations.between[min(d, c), max(d, c)] >> b & 1:
                        yield b, c, "tail"
                    else:
                        yield b, a, "arrow"
                        yield b, c, "arrow"
                    yield c, b, "arrow"


def _discriminated(graph: Pag, a: int, b: int, c: int, parents: int) -> Iterator[int]:
    """Start nodes of discriminating paths through A: over colliders that are parents of C, to a node not next to C."""
    seen, steps = 1 << a | 1 << b | 1 << c, [a]
    while steps:
        x = steps.pop()
        for d in members(graph.arrows[x] & ~seen):
            if _apart(graph, d, c):
                yield d
            elif parents >> d & 1 and graph.arrows[d] >> x & 1:
                steps.append(d)
            else:
                continue
            seen |= 1 << d


def _r5(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A o–o B on an uncovered cycle of circle edges, of four nodes at least: A – B, as every edge of the cycle."""
    circles = [graph.circles(x) for x in range(len(graph))]
    free = [sum(1 << y for y in members(circles[x]) if circles[y] >> x & 1) for x in range(len(graph))]
    for a in range(len(graph)):
        for b in members(free[a] >> (a + 1) << (a + 1)):
            ends = free[a] & ~graph.adjacent[b] & ~(1 << b)
            if any(_path(graph, free, a, x, b, 1 << a | 1 << x, graph.adjacent[a]) for x in members(ends)):
                yield a, b, "tail"
                yield b, a, "tail"


def _path(graph: Pag, steps: Sequence[int], before: int, node: int, goal: int, seen: int, last: int = 0) -> bool:
    """Whether an uncovered path by `steps` continues from before – at to the goal, and not from the mask `last`."""
    beyond = steps[node] & ~seen & ~graph.adjacent[before]
    if beyond >> goal & 1 and not last >> node & 1:
        return True
    beyond &= ~(1 << goal)
    return any(_path(graph, steps, node, x, goal, seen | 1 << x, last) for x in members(beyond))


def _r6(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A – B o–* C: B –* C."""
    for b in range(len(graph)):
        if any(graph.tails[a] >> b & 1 for a in members(graph.tails[b])):
            for c in members(graph.circles(b)):
                yield b, c, "tail"


def _r7(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A –o B o–* C, A and C not adjacent: B –* C."""
    for b in range(len(graph)):
        ends = [a for a in members(graph.circles(b)) if graph.tails[a] >> b & 1]
        for c in members(graph.circles(b)) if ends else ():
            if any(a != c and _apart(graph, a, c) for a in ends):
                yield b, c, "tail"


def _halfway(graph: Pag) -> Iterator[tuple[int, int]]:
    """Edges A o→ C."""
    for c in range(len(graph)):
        for a in members(graph.arrows[c]):
            if graph.circles(a) >> c & 1:
                yield a, c


def _r8(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A → B → C or A –o B → C, and A o→ C: A → C."""
    for a, c in _halfway(graph):
        between = graph.tails[a] & graph.parents(c)
        if any(not graph.tails[b] >> a & 1 for b in members(between)):
            yield a, c, "tail"


def _possible_children(graph: Pag) -> list[int]:
    children = [0] * len(graph)
    for y in range(len(graph)):
        for x in members(graph.possible_parents(y)):
            children[x] |= 1 << y
    return children


def _r9(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A o→ C and an uncovered path ⟨A, B, …, D, C⟩ of possible parents, B and C not adjacent: A → C."""
    steps = _possible_children(graph)
    for a, c in _halfway(graph):
        first = steps[a] & ~graph.adjacent[c] & ~(1 << c)
        if any(_path(graph, steps, a, b, c, 1 << a | 1 << b) for b in members(first)):
            yield a, c, "tail"


def _r10(graph: Pag, separations: Separations) -> Iterator[Proposal]:
    """A o→ C, B → C ← D, uncovered paths of possible parents A–B and A–D, whose first nodes are not adjacent: A → C."""
    steps = _possible_children(graph)
    for a, c in _halfway(graph):
        parents, reached = graph.parents(c) & ~(1 << a), {}
        for e in members(steps[a] & ~(1 << c) if parents else 0):
            seen = 1 << a | 1 << c | 1 << e
            ends = (b for b in members(parents) if b == e or _path(graph, steps, a, e, b, seen))
            reached[e] = sum(1 << b for b in ends)
        pairs = ((e, f) for e, f in combinations(reached, 2) if _apart(graph, e, f) and reached[e] and reached[f])
        if any((reached[e] | reached[f]).bit_count() > 1 for e, f in pairs):
            yield a, c, "tail"


ARROWHEADS: tuple[Rule, ...] = (_r1, _r2, _r3, _r4)
