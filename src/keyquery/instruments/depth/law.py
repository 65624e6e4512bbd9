"""Law: how wide a Transformer is to be at each depth, as fitted in "Limits to Depth Efficiencies of Self-Attention"."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PER_LAYER = 12  # parameters of a layer over d²: 4 of attention, 8 of an MLP four times as wide
FITTED = (6, 48)  # layers of the decoders that the law was fitted on
SIGMAS = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Law:
    """ln d = a + b·L between the width d and the depth L, with N = 12·L·d² parameters, embeddings not among them.

    The errors of a and b are recalled, not checked against the paper, and taken to be independent. `rank` is that of
    the embeddings: width beyond it is not used, and the law's width is min(d, rank).

    >>> law = Law()
    >>> round(law.width(70)), round(law.layers(1.75e11), 1)
    (7510, 80.5)
    """

    a: float = 5.039
    b: float = 0.0555
    a_error: float = 0.030
    b_error: float = 0.0013
    rank: int | None = None

    def width(self, layers: float, sigmas: float = 0.0) -> float:
        """The width at a depth; with `sigmas`, so many standard errors above it.

        >>> [round(Law().width(24, sigmas)) for sigmas in (-1.96, 0, 1.96)]
        [537, 585, 636]
        """
        found = math.exp(min(self.a + self.b * layers + sigmas * self._error(layers), 700.0))
        return found if self.rank is None else min(found, self.rank)

    def depth(self, width: float) -> float:
        """The depth at which the law has this width; below 1 where it has no such shape.

        >>> round(Law().depth(768), 1)
        28.9
        """
        return (math.log(width) - self.a) / self.b

    def layers(self, params: float, sigmas: float = 0.0) -> float:
        """The depth at a budget: where 12·L·d² = N crosses the law, or its edge `sigmas` standard errors above it.

        ln L + 2(a + b·L) = ln(N/12) has one solution, since its left side grows with L.
        """
        goal = math.log(params / PER_LAYER)
        free = _root(lambda layers: math.log(layers) + 2 * self._exponent(layers, sigmas) - goal)
        if self.rank is None or self._exponent(free, sigmas) <= math.log(self.rank):
            return free
        return params / PER_LAYER / self.rank**2

    def contained(self, layers: float, width: float) -> tuple[float, float] | None:
        """The largest shape of the law that is neither deeper nor wider than this one; None where there is none.

        >>> tuple(round(size) for size in Law().contained(12, 768))
        (12, 300)
        >>> tuple(round(size) for size in Law().contained(96, 12288))
        (79, 12288)
        """
        if width >= (own := self.width(layers)):
            return (layers, own)
        found = self.depth(width)
        return (found, width) if found >= 1 else None

    def _exponent(self, layers: float, sigmas: float) -> float:
        return self.a + self.b * layers + sigmas * self._error(layers)

    def _error(self, layers: float) -> float:
        return math.hypot(self.a_error, layers * self.b_error)


def count(layers: float, width: float) -> float:
    """N = 12·L·d².

    >>> count(12, 768)
    84934656
    """
    return PER_LAYER * layers * width**2


def _root(rises: Callable[[float], float]) -> float:
    """Where a function that grows from −∞ to ∞ over the positive numbers is 0, to the last bit."""
    low = high = 1.0
    while rises(low) > 0:
        low /= 2
    while rises(high) < 0:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return low
