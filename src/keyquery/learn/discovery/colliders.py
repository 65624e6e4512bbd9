"""Which nodes between two separated ones are colliders, where tests of independence err."""

from __future__ import annotations

from collections.abc import Mapping

from keyquery.learn.discovery.independence import Query, Test
from keyquery.learn.discovery.knowledge import Knowledge
from keyquery.learn.discovery.pag import Pag, members

Pair = tuple[int, int]


class Decided(dict[Pair, int]):
    """By separated pair, the mask of nodes that are no colliders between them.

    `unsure` holds the masks of common neighbours on which tests disagree: no rule concludes anything from them.
    """

    def __init__(self, between: Mapping[Pair, int], unsure: Mapping[Pair, int] | None = None) -> None:
        super().__init__(between)
        self.unsure = unsure or {}


def decided(
    graph: Pag, test: Test, separations: Mapping[Pair, int], unions: Mapping[Pair, int], known: Knowledge
) -> Decided:
    """Colliders by the more independent of two tests.

    With exact tests a node between x and y is in all of their separating sets or in none. Tests that err disagree. A
    common neighbour that some separating sets of a round contain, but not the best one, Z, is left undecided. Any other
    is tested with and without: it is a collider if x and y are more independent given Z without it. This costs one test
    per unshielded triple, and undoes edges x – y that were lost although the node does not explain it.
    """
    between, unsure = dict[Pair, int](), dict[Pair, int]()
    for (x, y), best in separations.items():
        common = graph.adjacent[x] & graph.adjacent[y] & ~(known.barred[x] & known.barred[y])
        unsure[x, y] = common & unions[x, y] & ~best
        flipped = 0
        for node in members(common & ~unsure[x, y]):
            other = best ^ 1 << node
            if other.bit_count() <= test.most:
                least = min(test.threshold, test.statistic(Query(x, y, best)))
                flipped |= (test.statistic(Query(x, y, other)) < least) << node
        between[x, y] = best ^ flipped
    return Decided(between, unsure)
