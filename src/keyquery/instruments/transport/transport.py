"""`transport`: how far points went through training, beside how far they would have had to go.

A path is the places of the same points at every step, p₀ to p_K. Optimal transport between its start and its end is
the cheapest way from the one cloud to the other, whichever point goes where. What training did beyond that is the Monge
gap; detours on the way are what efficiency counts.
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
from keyquery.instruments.transport.path import ArrayCourse, Course, ends
from keyquery.instruments.transport.sketch import sketch
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress, silent

FRAMES, POINTS = 25, 300  # steps that curves have and a page shows, and points that it shows
CURVES = ("distance", "wasserstein", "optimality", "path_length", "efficiency")
TOLD = ("points", "distance", "wasserstein", "random", "monge_gap", *CURVES[2:], "matched", "bures", "exact")


@dataclass(frozen=True, kw_only=True)
class Transport(Reading, kind="transport"):
    """A path of points beside the optimal transport from its start to its end, overall and for each class.

    Every class has the figures of the whole, its `points`, and `least`, which its W₂ is proven to be at least: that is
    less than `wasserstein` where Sinkhorn stood in for the exact coupling. `curves` hold figures of the path up to each
    of `steps`; `heads` what the parts of each head were at these; `sketch` the cloud in two dimensions.
    """

    units: ClassVar[Mapping[str, str]] = {
        "distance": "T = √(mean ‖p₀ − p_K‖²)",
        "wasserstein": "W₂ = √(min over matchings of the same mean); never across classes",
        "random": "√(mean over all pairs of a class ‖p₀ᵢ − p_Kⱼ‖²): T of partners drawn by lot",
        "monge_gap": "T − W₂",
        "optimality": "W₂/T, 0 to 1; none where T = 0",
        "path_length": "mean of Σ ‖p_k+1 − p_k‖",
        "efficiency": "mean ‖p₀ − p_K‖ / path length, 0 to 1; none where nothing moved",
        "matched": "share of points whose optimal partner is themselves",
        "bures": "W₂ between Gaussians of the same means and covariances",
        "symmetry": "(‖S‖² − ‖A‖²)/‖M‖² of a head's weights, −1 skew to 1 symmetric",
    }

    model: Mapping[str, Any]
    points: int
    distance: float
    wasserstein: float
    random: float
    monge_gap: float
    optimality: float | None
    path_length: float
    efficiency: float | None
    matched: float
    bures: float
    exact: bool
    published: bool
    classes: Sequence[Mapping[str, Any]]
    unit: str = "step"
    steps: Sequence[int] = ()
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    sketch: Mapping[str, Any] | None = None
    heads: Sequence[Mapping[str, Any]] = ()

    def records(self) -> list[dict[str, Any]]:
        """One row for the whole, and one a class where there are several."""
        rows = [{"class": "all", **{name: getattr(self, name) for name in TOLD}}]
        several = self.classes if len(self.classes) > 1 else ()
        return rows + [{"class": row["class"], **{name: row[name] for name in TOLD}} for row in several]


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
    """How a path of points compares with the optimal transport from its start to its end, as a Reading.

    `path` has shape (steps + 1, points, dims): a tensor, an array, also a memory map, or a list of clouds. Points of
    one of `labels` are matched among themselves; squares of overall figures are means of the classes' over all points.
    All is in float64. `published` gives the numbers of the released code instead, for comparison: sums over points and
    classes, and an efficiency that divides a root of summed squares by a sum of lengths.

    Curves have at most `frames` steps, each of which takes a coupling, and the page that many, of at most `points`
    points. Classes of more than `exact_limit` points are coupled by Sinkhorn. Needs the extra `transport`.

    >>> cloud = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> straight = kq.transport([cloud, cloud + 1, cloud + 3])              # together, and straight ahead
    >>> straight.optimality, round(straight.efficiency, 12)
    (1.0, 1.0)
    >>> turned = kq.transport([cloud, cloud.roll(1, 0)])                    # three points that changed places
    >>> turned.wasserstein, round(turned.distance, 3), turned.matched
    (0.0, 1.826, 0.0)
    """
    course = ArrayCourse(path)
    told = {"model": {"name": name}, "provenance": provenance(records=len(course.steps), tensors=ends(course))}
    return measured(course, labels, published, frames, points, exact_limit, progress, told)


def measured(
    course: Course,
    labels: Any,
    published: bool,
    frames: int,
    points: int,
    exact_limit: int,
    progress: Progress | None,
    told: Mapping[str, Any],
) -> Transport:
    """The reading of a course, whoever recorded it; `told` is what is known of it besides."""
    check_count("points", points)
    groups = groups_of(labels, course.count)
    last = len(course.steps) - 1
    shown = frames_of(last, frames)
    start, end, gone = course.place(0), course.place(last), course.gone(last)
    target, parts = torch.empty_like(start), []
    for rows in groups.values():
        part, target[rows] = _class(start[rows], end[rows], gone[rows], exact_limit)
        parts.append(part)
    classes = [{"class": name, **_figures([part], published)} for name, part in zip(groups, parts, strict=True)]
    curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
    for at in (progress or silent)(shown, "coupling steps", len(shown)):
        pieces = parts
        if at != last:
            place, length = course.place(at), course.gone(at)
            pieces = [_way(start[rows], place[rows], length[rows], exact_limit)[0] for rows in groups.values()]
        now = _figures(pieces, published)
        for name, values in curves.items():
            values.append(now[name])
    drawn = sketch(course, shown, groups, target, points) if frames else None
    steps = [course.steps[at] for at in shown]
    whole = _figures(parts, published)
    del whole["least"]  # that of the classes is told with each
    return Transport(**told, **whole, published=published, classes=classes, steps=steps, curves=curves, sketch=drawn)


def frames_of(last: int, frames: int) -> list[int]:
    """At most so many records, evenly from the first to the last.

    >>> frames_of(10, 4)
    [0, 3, 7, 10]
    """
    check_count("frames", frames, least=0)
    return sorted({round(at) for at in np.linspace(0, last, min(max(frames, 2), last + 1)).tolist()}) if frames else []


def groups_of(labels: Any, count: int) -> dict[Any, Tensor]:
    """The rows of each class, in order of their names; one class of all where there are no labels.

    >>> groups_of(["b", "a", "b"], 3)
    {'a': tensor([1]), 'b': tensor([0, 2])}
    """
    if labels is None:
        return {"all": torch.arange(count)}
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.shape != (count,):
        raise ValueError(f"labels must name the class of each of {count} points, got shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("labels must be finite, got NaN or infinite ones")
    if array.dtype == object:
        if any(name is None or name != name for name in array):
            raise ValueError("labels must name the class of every point, got None or NaN")
        array = np.array([str(name) for name in array])
    names, index = np.unique(array, return_inverse=True)
    return {name.item(): torch.from_numpy(np.flatnonzero(index == at)) for at, name in enumerate(names)}


@dataclass(frozen=True)
class _Part:
    """A class: its points, T², W₂² and its bound, mean ‖p₀ − p_K‖, path length, and what curves do without."""

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


Figures = dict[str, Any]


def _way(
    start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], gone: Float[Tensor, " n"], limit: int
) -> tuple[_Part, Any]:
    """What a curve needs of a class, and the coupling."""
    moved = (start - end).norm(dim=-1)
    coupling = match(start, end, exact_limit=limit)
    square = float((start - end).square().sum(-1).mean())
    best = min(float(coupling.cost), square)  # staying with oneself is a coupling, too
    least = min(float(coupling.least), best)
    part = _Part(len(start), square, best, least, float(moved.mean()), float(gone.mean()), exact=coupling.exact)
    return part, coupling


def _class(
    start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], gone: Float[Tensor, " n"], limit: int
) -> tuple[_Part, Float[Tensor, "n d"]]:
    """All of a class, and where each point would have gone."""
    part, coupling = _way(start, end, gone, limit)
    own = torch.arange(len(start), device=coupling.partner.device)
    more = {"matched": float((coupling.partner == own).double().mean()), "bures": float(gaussian(start, end))}
    spread = sum(float((cloud - cloud.mean(0)).square().sum(-1).mean()) for cloud in (start, end))
    more["random"] = float((start.mean(0) - end.mean(0)).square().sum()) + spread  # the mean over all pairs
    return _Part(**{**vars(part), **more}), coupling.target


def _figures(parts: Sequence[_Part], published: bool) -> Figures:
    """The figures of some classes together, ours or as published."""
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
        "efficiency": min(straight / length, 1.0) if length else None,  # above it by rounding alone
        "matched": mean(lambda part: part.matched),
        "bures": bures,
        "least": least,
        "exact": all(part.exact for part in parts),
    }
