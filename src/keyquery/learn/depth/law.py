"""Law: the width of a Transformer at each depth, as fitted in "Limits to Depth Efficiencies of Self-Attention"."""

from __future__ import annotations

import math
from dataclasses import dataclass

PER_LAYER = 12  # parameters of a layer over d²: 4 of attention, 8 of an MLP four times as wide
FITTED = (6, 48)  # layers of the decoders that the law was fitted on
SIGMAS = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Law:
    """ln d = a + b·L between width d and depth L, with N = 12·L·d² non-embedding parameters.

    `a_error` and `b_error` are standard errors, of your own fit: none are checked for the published one. `rank` is that
    of the embeddings: the law's width is then min(d, rank).
    """

    a: float = 5.039
    b: float = 0.0555
    a_error: float | None = None
    b_error: float | None = None
    rank: int | None = None

    @property
    def has_errors(self) -> bool:
        """Whether its standard errors are known."""
        return self.a_error is not None and self.b_error is not None

    def width(self, layers: float, sigmas: float = 0.0) -> float:
        """The width at a depth, plus `sigmas` standard errors."""
        width = math.exp(min(self.a + self.b * layers + sigmas * self._error(layers), 700.0))
        return width if self.rank is None else min(width, self.rank)

    def depth(self, width: float) -> float:
        """The depth at which the law has this width; below 1 if there is no such shape.

        >>> round(Law().depth(768), 1)
        28.9
        """
        return (math.log(width) - self.a) / self.b

    def layers(self, params: float, sigmas: float = 0.0) -> float:
        """The depth for a parameter count: where 12·L·d² = N crosses the law, shifted by `sigmas` standard errors.

        ln L + 2(a + b·L) = ln(N/12) has one solution, since its left side increases with L.
        """
        from scipy.optimize import brentq  # a slow import

        goal = math.log(params / PER_LAYER)
        free = brentq(lambda layers: math.log(layers) + 2 * self._exponent(layers, sigmas) - goal, 1e-99, 1e19)
        if self.rank is None or self._exponent(free, sigmas) <= math.log(self.rank):
            return free
        return params / PER_LAYER / self.rank**2

    def contained(self, layers: float, width: float) -> tuple[float, float] | None:
        """The largest shape on the law that is neither deeper nor wider than this one; None if there is none."""
        if width >= (width_of_law := self.width(layers)):
            return (layers, width_of_law)
        layers_at_width = self.depth(width)
        return (layers_at_width, width) if layers_at_width >= 1 else None

    def _exponent(self, layers: float, sigmas: float) -> float:
        return self.a + self.b * layers + sigmas * self._error(layers)

    def _error(self, layers: float) -> float:
        return math.hypot(self.a_error or 0.0, layers * (self.b_error or 0.0))


def count(layers: float, width: float) -> float:
    """N = 12·L·d²."""
    return PER_LAYER * layers * width**2


def width_within(params: float, layers: float) -> float:
    """The width of so many layers within a parameter budget."""
    return math.sqrt(params / count(layers, 1))
