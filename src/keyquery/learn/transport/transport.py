"""`transport`: how far points moved during training, compared with optimal transport.

A path holds the positions of the same points at every step, p₀ to p_K. Optimal transport between its start and its end
is the cheapest matching of the two clouds. The excess cost of training is the Monge gap; detours lower the efficiency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.coupling import EXACT, gaussian, match
from keyquery.learn.transport.path import ArrayCourse, Course, ends
from keyquery.learn.transport.sketch import sketch
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress, silent

FRAMES, POINTS = 25, 300  # steps of curves and of the page, and points on the page
CURVES = ("distance", "wasserstein", "optimality", "path_length", "efficiency")
FIGURES = ("points", "distance", "wasserstein", "random", "monge_gap", *CURVES[2:], "matched", "bures", "exact")


@dataclass(frozen=True, kw_only=True)
class Transport(Reading, kind="transport"):
    """A path of points compared with the optimal transport from its start to its end, overall and per class.

    Every class has the same metrics, its `points`, and `least`, a lower bound of its W₂, below `wasserstein` where
    Sinkhorn replaced the exact coupling. `curves` hold metrics of the path up to each of `steps`; `heads` the energies
    of each head at these steps; `sketch` the points in two dimensions.
    """

    units: ClassVar[Mapping[str, str]] = {
        "distance": "T = √(mean ‖p₀ − p_K‖²)",
        "wasserstein": "W₂ = √(min over matchings of the same mean); never across classes",
        "random": "√(mean over all pairs of a class ‖p₀ᵢ − p_Kⱼ‖²): T under random matching",
        "monge_gap": "T − W₂",
        "optimality": "W₂/T, 0 to 1; None if T = 0",
        "path_length": "mean of Σ ‖p_k+1 − p_k‖",
        "efficiency": "mean ‖p₀ − p_K‖ / path length, 0 to 1; None if nothing moved",
        "matched": "share of points matched to themselves",
        "bures": "W₂ between Gaussians of the same means and covariances",
        "symmetry": "(‖S‖² − ‖A‖²)/‖M‖² of a head's weights, −1 skew to 1 symmetric",
    }

    model: Mapping[str, Any]  # name and facts of the model
    points: int  # that were followed
    distance: float
    wasserstein: float
    random: float
    monge_gap: float
    optimality: float | None
    path_length: float
    efficiency: float | None
    matched: float
    bures: float
    exact: bool  # couplings by assignment, not by Sinkhorn
    published: bool  # numbers as in the released code
    classes: Sequence[Mapping[str, Any]]  # the same metrics per class
    unit: str = "step"  # of `steps`
    steps: Sequence[int] = ()  # at which curves are measured
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # metrics of the path up to each step
    sketch: Mapping[str, Any] | None = None  # the points in two dimensions
    heads: Sequence[Mapping[str, Any]] = ()  # energies of each head at these steps

    def records(self) -> list[dict[str, Any]]:
        """One row overall, and one per class if there are several."""
        rows = [{"class": "all", **{name: getattr(self, name) for name in FIGURES}}]
        several = self.classes if len(self.classes) > 1 else ()
        return rows + [{"class": row["class"], **{name: row[name] for name in FIGURES}} for row in several]


def transport(
    path: Any,
    labels: Any = None,
    published: bool = False,
    *,
    frames: int = FRAMES,
    points: int = POINTS,
    exact_limit: int = EXACT,
    name: str = "a path",
    progress: Progress | None = None,
) -> Transport:
    """Compare a path of points with the optimal transport from its start to its end.

    T = √(mean ‖p₀ − p_K‖²), W₂ = min of the same over matchings, Monge gap = T − W₂, optimality = W₂/T,
    efficiency = mean ‖p₀ − p_K‖ / mean path length. All in float64.

    Parameters
    ----------
    path
        Positions (steps + 1, points, dims): a tensor, an array, a memory map, or a list of point clouds.
    labels
        Class of each point; points are matched within classes only. Squared overall metrics are averages over points.
        Default: one class.
    published
        Compute the numbers of the released code instead: sums over points and classes, and an efficiency that divides
        a root of summed squares by a sum of lengths. Default: False.
    frames
        Largest number of steps in curves and on the page; each needs a coupling. Default: 25.
    points
        Largest number of points on the page. Default: 300.
    exact_limit
        Classes with more points are coupled by Sinkhorn. Default: 5000.
    name
        Name of the path. Default: "a path".
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Transport
        Metrics overall and per class, and curves over steps.

    Raises
    ------
    ImportError
        Without the extra `transport`.
    TypeError, ValueError
        If `path` has the wrong shape or is not finite, or `labels` do not fit.

    Examples
    --------
    >>> cloud = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> straight = kq.transport([cloud, cloud + 1, cloud + 3])  # a translation
    >>> straight.optimality, round(straight.efficiency, 12)
    (1.0, 1.0)
    >>> permuted = kq.transport([cloud, cloud.roll(1, 0)])  # three points exchange positions
    >>> permuted.wasserstein, round(permuted.distance, 3), permuted.matched
    (0.0, 1.826, 0.0)

    See Also
    --------
    TransportLens : Record such a path during training.
    monge_gap : The Monge gap of one map.
    """
    recorded = ArrayCourse(path)
    facts = {"model": {"name": name}, "provenance": provenance(records=len(recorded.steps), tensors=ends(recorded))}
    settings = Settings(published, frames, points, exact_limit)
    return measured(recorded, labels, settings, facts, progress)


@dataclass(frozen=True)
class Settings:
    """How a path is compared with its optimal transport, as in `transport`; checked when created."""

    published: bool
    frames: int
    points: int
    exact_limit: int

    def __post_init__(self) -> None:
        check_count("points", self.points)
        check_count("frames", self.frames, least=0)


def measured(
    course: Course, labels: Any, settings: Settings, facts: Mapping[str, Any], progress: Progress | None
) -> Transport:
    """The reading of a recorded path; `facts` are further fields of the reading."""
    published, limit = settings.published, settings.exact_limit
    groups = groups_of(labels, course.count)
    last = len(course.steps) - 1
    selected = frames_of(last, settings.frames)
    start = course.place(0)
    end = course.place(last)
    lengths = course.gone(last)
    target = torch.empty_like(start)
    parts = []
    for rows in groups.values():
        part, target[rows] = _class_statistics(start[rows], end[rows], lengths[rows], limit)
        parts.append(part)
    classes = [{"class": name, **_metrics([part], published)} for name, part in zip(groups, parts, strict=True)]
    curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
    for at in (progress or silent)(selected, "coupling steps", len(selected)):
        pieces = parts
        if at != last:
            place, length = course.place(at), course.gone(at)
            pieces = [_path_statistics(start[rows], place[rows], length[rows], limit)[0] for rows in groups.values()]
        now = _metrics(pieces, published)
        for name, values in curves.items():
            values.append(now[name])
    drawn = sketch(course, selected, groups, target, settings.points) if settings.frames else None
    steps = [course.steps[at] for at in selected]
    whole = _metrics(parts, published)
    del whole["least"]  # reported per class
    return Transport(**facts, **whole, published=published, classes=classes, steps=steps, curves=curves, sketch=drawn)


def frames_of(last: int, frames: int) -> list[int]:
    """At most `frames` records, evenly spaced from first to last."""
    check_count("frames", frames, least=0)
    return sorted({round(at) for at in np.linspace(0, last, min(max(frames, 2), last + 1)).tolist()}) if frames else []


def groups_of(labels: Any, count: int) -> dict[Any, Tensor]:
    """The rows of each class, sorted by name; a single class "all" without labels."""
    if labels is None:
        return {"all": torch.arange(count)}
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.shape != (count,):
        raise ValueError(f"labels must have one class per point, {count}, got shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("labels must be finite, got NaN or infinity")
    if array.dtype == object:
        if any(name is None or name != name for name in array):
            raise ValueError("labels must not contain None or NaN")
        array = np.array([str(name) for name in array])
    names, index = np.unique(array, return_inverse=True)
    return {name.item(): torch.from_numpy(np.flatnonzero(index == at)) for at, name in enumerate(names)}


@dataclass(frozen=True)
class _Part:
    """Statistics of a class: points, T², W₂² and its lower bound, mean ‖p₀ − p_K‖, path length."""

    points: int
    square: float
    best: float
    least: float
    straight: float
    length: float
    random: float = 0.0  # squared
    matched: float = 0.0
    bures: float = 0.0
    exact: bool = True


Metrics = dict[str, Any]


def _path_statistics(
    start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], lengths: Float[Tensor, " n"], limit: int
) -> tuple[_Part, Any]:
    """Statistics of a class for curves, and the coupling."""
    moved = (start - end).norm(dim=-1)
    coupling = match(start, end, exact_limit=limit)
    square = float((start - end).square().sum(-1).mean())
    best = min(float(coupling.cost), square)  # the identity is a coupling, too
    least = min(float(coupling.least), best)
    part = _Part(len(start), square, best, least, float(moved.mean()), float(lengths.mean()), exact=coupling.exact)
    return part, coupling


def _class_statistics(
    start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], lengths: Float[Tensor, " n"], limit: int
) -> tuple[_Part, Float[Tensor, "n d"]]:
    """All statistics of a class, and the optimal target of each point."""
    part, coupling = _path_statistics(start, end, lengths, limit)
    own = torch.arange(len(start), device=coupling.partner.device)
    more = {"matched": float((coupling.partner == own).double().mean()), "bures": float(gaussian(start, end))}
    spread = sum(float((cloud - cloud.mean(0)).square().sum(-1).mean()) for cloud in (start, end))
    more["random"] = float((start.mean(0) - end.mean(0)).square().sum()) + spread  # the mean over all pairs
    return _Part(**{**vars(part), **more}), coupling.target


def _metrics(parts: Sequence[_Part], published: bool) -> Metrics:
    """Metrics of some classes together, ours or as published."""
    count = sum(part.points for part in parts)

    def mean(of: Callable[[_Part], float]) -> float:
        return sum(part.points * of(part) for part in parts) / count

    squares: list[Callable[[_Part], float]] = [
        lambda part: part.square,
        lambda part: part.best,
        lambda part: part.random,
        lambda part: part.least,
    ]
    if published:
        distance, wasserstein, random, least = (
            sum((part.points * square(part)) ** 0.5 for part in parts) for square in squares
        )
        length, straight = count * mean(lambda part: part.length), distance
        bures = sum(part.bures**2 for part in parts)
    else:
        distance, wasserstein, random, least = (mean(square) ** 0.5 for square in squares)
        length, straight = mean(lambda part: part.length), mean(lambda part: part.straight)
        bures = mean(lambda part: part.bures**2) ** 0.5
    return {
        "points": count,
        "distance": distance,
        "wasserstein": wasserstein,
        "random": random,
        "monge_gap": distance - wasserstein,
        "optimality": wasserstein / distance if distance else None,
        "path_length": length,
        "efficiency": min(straight / length, 1.0) if length else None,  # above 1 only by rounding
        "matched": mean(lambda part: part.matched),
        "bures": bures,
        "least": least,
        "exact": all(part.exact for part in parts),
    }
