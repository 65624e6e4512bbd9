"""Which layer of one model each layer of another comes from: the best path through a table of similarities."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

JUMP = 3.0  # standard deviations that a jump between layers must gain: pruned and stacked models jump, others do not


def best_path(z: Float[np.ndarray, "ours theirs"], jump: float = JUMP) -> tuple[float, list[int]]:
    """The source layer of each of their layers, by dynamic programming, and the sum of its similarities less its jumps.

    The layer after the previous source is free, every other layer costs `jump`.

    >>> best_path(np.array([[9.0, 0, 0, 0], [0, 9, 0, 9], [0, 0, 9, 0]]))  # layer 1 stands there twice
    (33.0, [0, 1, 2, 1])
    """
    ours, theirs = z.shape
    total, came_from = z[:, 0].copy(), np.zeros((theirs, ours), dtype=int)
    for layer in range(1, theirs):
        best = int(total.argmax())
        follow = np.concatenate(([-np.inf], total[:-1]))
        jumps = total[best] - jump
        came_from[layer] = np.where(follow >= jumps, np.arange(ours) - 1, best)
        total = np.maximum(follow, jumps) + z[:, layer]
    path = [int(total.argmax())]
    for layer in range(theirs - 1, 0, -1):
        path.append(int(came_from[layer, path[-1]]))
    return float(total.max()), path[::-1]


def matched(similarity: Float[np.ndarray, "ours theirs"]) -> list[int]:
    """Our head for each of their heads: the assignment of the largest total; with more of theirs, some occur twice.

    >>> matched(np.array([[0.9, 0.8], [0.8, 0.1]]))
    [1, 0]
    """
    ours, theirs = similarity.shape
    tiled = np.tile(similarity, (-(-theirs // ours), 1)) if theirs > ours else similarity
    return [row % ours for row in _assignment(-tiled.T)]


def _assignment(cost: Float[np.ndarray, "rows columns"]) -> list[int]:
    """The column of each row in the cheapest assignment, by shortest augmenting paths; columns ≥ rows."""
    rows, columns = cost.shape
    row_price, column_price = np.zeros(rows + 1), np.zeros(columns + 1)
    owner = np.zeros(columns + 1, dtype=int)  # row of each column, from 1; 0: none
    for row in range(1, rows + 1):
        owner[0], column = row, 0
        slack, way = np.full(columns + 1, np.inf), np.zeros(columns + 1, dtype=int)
        seen = np.zeros(columns + 1, dtype=bool)
        while owner[column]:
            seen[column] = True
            now = owner[column]
            reduced = cost[now - 1] - row_price[now] - column_price[1:]
            closer = ~seen[1:] & (reduced < slack[1:])
            slack[1:][closer], way[1:][closer] = reduced[closer], column
            nearest = int(np.where(seen, np.inf, slack)[1:].argmin()) + 1
            step = slack[nearest]
            row_price[owner[seen]] += step
            column_price[seen] -= step
            slack[~seen] -= step
            column = nearest
        while column:
            owner[column] = owner[way[column]]
            column = way[column]
    return [int(np.flatnonzero(owner[1:] == row)[0]) for row in range(1, rows + 1)]
