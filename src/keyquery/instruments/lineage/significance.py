"""From similarities of layers to a statistic and a p-value.

The null has K replicates of the table of similarities in which one model's features were made unrelated. Every pair of
layers is standardised by them, and the best path through the table is compared with the best paths of the replicates.
What unrelated heads share in any case, such as the edges of a spectrum, shifts all cells of the observed table alike:
the cells off the best path, heads of unrelated layers, measure it, and it is subtracted, in the replicates as well.
The p-value is that of a gamma variable, since the best of many paths is skewed, with the tail of Student's t.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from keyquery.instruments.lineage.alignment import best_paths
from keyquery.support.statistics import student_tail

# Location, scale and skewness of the statistic over unrelated pairs, and degrees of freedom of its tail. Basis-free:
# fitted to five configs together, see `keyquery study lineage`. Shared basis: the null is exact, so that its location
# and scale are 0 and 1, and there are 24 replicates; the skewness is that of the best path.
UNRELATED = {"basis-free": (0.17, 1.0, 0.7, 20), "shared basis": (0.0, 1.0, 0.3, 22)}
LAYERS = 4  # at which the location is the one above: layers of equal depth are a little alike, and it grows with them
SHIFT = 0.25  # of a cell of unrelated models, in standard deviations, where no other layers measure it
WEIGHT = 1.0  # of that, in cells


def standardised(scores: Float[np.ndarray, "tables ours theirs"]) -> Float[np.ndarray, "tables ours theirs"]:
    """z of all cells; the first table is the observed one, the others are replicates of the null.

    Each cell has its own mean, all have one spread, since replicates are few. The mean is known from K replicates, of
    which the observed table is none: the deviations of replicates are made as large as if they were none either.
    """
    count = len(scores) - 1
    null = scores[1:]
    spread = math.sqrt(float(null.var(0, ddof=1).mean()) * (1 + 1 / count)) or 1e-12
    z = (scores - null.mean(0)) / spread
    z[1:] *= math.sqrt((count + 1) / (count - 1))
    return z


def path_statistic(
    z: Float[np.ndarray, "tables ours theirs"], centred: bool
) -> tuple[float, list[int], Float[np.ndarray, "ours theirs"]]:
    """The best path of the first table in standard deviations of those of the others, the path, and the table."""
    totals, paths = best_paths(z)
    if centred:
        on_path = np.zeros(z.shape, bool)
        on_path[np.arange(len(z))[:, None], paths, np.arange(z.shape[2])] = True
        sums, cells = np.where(on_path, 0.0, z).sum((1, 2)), z.shape[1] * z.shape[2] - z.shape[2]
        sums[0] += WEIGHT * SHIFT
        totals, paths = best_paths(z - (sums / (cells + WEIGHT))[:, None, None])
    null = totals[1:]
    spread = max(float(null.std(ddof=1)), 1e-12) * math.sqrt(1 + 1 / len(null))
    return float((totals[0] - null.mean()) / spread), paths[0].tolist(), z[0]


def p_value(test: str, statistic: float, layers: int = LAYERS) -> float:
    """The probability of so large a statistic between unrelated models, the second of which has so many layers."""
    location, scale, skewness, freedom = UNRELATED[test]
    location *= max(layers / LAYERS, 1.0)
    return student_tail(_normal_score((statistic - location) / scale, skewness), freedom)


def _normal_score(x: float, skewness: float) -> float:
    """Of a gamma variable with mean 0, variance 1 and this skewness: Wilson and Hilferty's cube root."""
    root = math.copysign(abs(1 + skewness * x / 2) ** (1 / 3), 1 + skewness * x / 2)
    return 6 / skewness * (root - 1) + skewness / 6


def p_text(p: float) -> str:
    """A p-value in words: beyond 1e-15 its calibration means nothing."""
    return f"{p:.1e}" if p > 1e-15 else "< 1e-15"
