"""Which layer of one model each layer of another comes from: the best path through a table of similarities."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

JUMP = 3.0  # standard deviations that a jump between layers must gain: pruned and stacked models jump, others do not


def best_paths(
    z: Float[np.ndarray, "tables ours theirs"],
) -> tuple[Float[np.ndarray, " tables"], Int[np.ndarray, "tables theirs"]]:
    """The source layer of each of their layers, by dynamic programming, and the sum of similarities less jumps.

    Of many tables at once. The layer after the previous source is free, every other layer costs JUMP.
    """
    total, steps = z[:, :, 0], []
    for layer in range(1, z.shape[2]):
        steps.append(total)
        total = _extended(total, z[:, :, layer])
    row = np.arange(len(z))
    path = [total.argmax(-1)]
    for before in reversed(steps):
        source = path[-1]
        follows = (source > 0) & (before[row, source - 1] >= before.max(-1) - JUMP)
        path.append(np.where(follows, source - 1, before.argmax(-1)))
    return total.max(-1), np.stack(path[::-1], 1)


def _extended(total: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The best sums of paths that end at each of our layers, one of their layers further."""
    follow = np.concatenate((np.full_like(total[..., :1], -np.inf), total[..., :-1]), -1)
    return np.maximum(follow, total.max(-1, keepdims=True) - JUMP) + column


def matched(similarity: Float[np.ndarray, "ours theirs"]) -> list[int]:
    """Our head for each of their heads: the assignment of the largest total; with more of theirs, some occur twice."""
    from scipy.optimize import linear_sum_assignment

    ours, theirs = similarity.shape
    tiled = np.tile(similarity, (-(-theirs // ours), 1))
    _, rows = linear_sum_assignment(tiled.T, maximize=True)
    return [int(row) % ours for row in rows]
