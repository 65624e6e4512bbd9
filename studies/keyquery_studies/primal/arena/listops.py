"""ListOps: nested lists of digits under MIN, MAX, MED and SM (sum modulo 10), to be evaluated to one digit.

Parameters of the published generator of the Long Range Arena: a node is an operator with probability ¼ (its constant
.25, although that is named the probability of a value) and otherwise a digit, at depth 10 always a digit; an operator
has 2 to 10 arguments, uniformly; MED is the median, rounded down; trees of more than 500 and fewer than 2,000 tokens
are kept. Different here: the order of random numbers, since whole levels of many trees are sampled at once; the root is
always an operator (a lone digit would be rejected anyway); no deduplication, since at 500 tokens there are no
duplicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

OPERATORS = ("MIN", "MAX", "MED", "SM")
DIGIT, OPEN, CLOSE = 1, 11, 15  # the first token of each kind; 0 is padding
OPERATOR_SHARE = 0.25
DEPTH = 10
ARGUMENTS = 10
SHORTEST, LONGEST = 500, 2000  # exclusive bounds
ATTEMPTS = 512  # trees sampled at once; about one in three is kept


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes of many trees at one depth. Children of a node are contiguous, in the order of their parents."""

    tree: Int64[np.ndarray, " nodes"]
    arity: Int64[np.ndarray, " nodes"]  # 0: a digit
    content: Int64[np.ndarray, " nodes"]  # the digit, or the index of the operator

    def kept(self, trees: np.ndarray, number: np.ndarray) -> _Level:
        """The nodes of the selected trees, renumbered."""
        chosen = trees[self.tree]
        return _Level(number[self.tree[chosen]], self.arity[chosen], self.content[chosen])


def listops(count: int, seed: Any) -> tuple[UInt8[np.ndarray, "count n"], UInt8[np.ndarray, " count"]]:
    """Token sequences, padded with 0 to 2,000, and the digit that each evaluates to.

    Tokens are 1 + digit, 11 + operator, which opens a list, and 15, which closes one: [MAX 2 9] is 12 3 10 15.
    """
    rng = np.random.default_rng(seed)
    tokens = [np.zeros((0, LONGEST), np.uint8)]
    labels = [np.zeros(0, np.uint8)]
    count_kept = 0
    while count_kept < count:
        levels = _fitting(_drawn(rng))
        row, label = _written(levels)
        tokens.append(row)
        labels.append(label)
        count_kept += len(row)
    return np.concatenate(tokens)[:count], np.concatenate(labels)[:count]


def _drawn(rng: np.random.Generator) -> list[_Level]:
    """Sample trees from the roots down, level by level."""
    tree, levels = np.arange(ATTEMPTS), []
    for depth in range(1, DEPTH + 1):
        share = {1: 1.0, DEPTH: 0.0}.get(depth, OPERATOR_SHARE)
        operator = rng.random(len(tree)) < share
        arity = np.where(operator, rng.integers(2, ARGUMENTS + 1, len(tree)), 0)
        content = np.where(operator, rng.integers(len(OPERATORS), size=len(tree)), rng.integers(10, size=len(tree)))
        levels.append(_Level(tree, arity, content))
        tree = tree.repeat(arity)
    return levels


def _fitting(levels: list[_Level]) -> list[_Level]:
    """Only the trees of admissible length: a digit is one token, an operator two."""
    length = np.sum([np.bincount(level.tree, 1.0 + (level.arity > 0), ATTEMPTS) for level in levels], 0)
    kept = (length > SHORTEST) & (length < LONGEST)
    return [level.kept(kept, kept.cumsum() - 1) for level in levels]


def _written(levels: list[_Level]) -> tuple[UInt8[np.ndarray, "count n"], UInt8[np.ndarray, " count"]]:
    """Tokens and labels: lengths and values bottom-up, then each node's position top-down."""
    sizes: list[Any] = [None] * len(levels)
    size, value = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for depth in reversed(range(len(levels))):
        level = levels[depth]
        operator = level.arity > 0
        own, symbols = np.ones(len(level.tree), np.int64), level.content.copy()
        if operator.any():
            starts = _starts(level.arity[operator])
            own[operator] = 2 + np.add.reduceat(size, starts)
            symbols[operator] = _evaluated(level.content[operator], level.arity[operator], starts, value)
        size, value = own, symbols
        sizes[depth] = own
    tokens = np.zeros(len(value) * LONGEST, np.uint8)
    place = np.arange(len(value)) * LONGEST
    for level, size, below in zip(levels, sizes, [*sizes[1:], np.zeros(0, np.int64)], strict=True):
        operator = level.arity > 0
        tokens[place] = np.where(operator, OPEN, DIGIT) + level.content
        tokens[(place + size - 1)[operator]] = CLOSE
        place = _places(level, place, below)
    return tokens.reshape(-1, LONGEST), value.astype(np.uint8)


def _places(level: _Level, place: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Token positions of the children of a level: after their parent's token and their preceding siblings."""
    arity = level.arity[level.arity > 0]
    before = below.cumsum() - below
    first = (place[level.arity > 0] + 1 - before[_starts(arity)]) if len(arity) else arity
    return before + first.repeat(arity)


def _starts(arity: np.ndarray) -> np.ndarray:
    return arity.cumsum() - arity


def _evaluated(operator: np.ndarray, arity: np.ndarray, starts: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The value of each operator; the median of an even number is the mean of the middle two, rounded down."""
    each = np.full((len(arity), ARGUMENTS), 10)  # larger than any digit: sorts to the end
    each[np.arange(ARGUMENTS) < arity[:, None]] = value
    each.sort(1)
    rows = np.arange(len(arity))
    median = (each[rows, (arity - 1) // 2] + each[rows, arity // 2]) // 2
    total = np.add.reduceat(value, starts) % 10
    return np.stack((each[:, 0], each[rows, arity - 1], median, total))[operator, rows]
