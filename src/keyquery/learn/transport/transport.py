"""`transport`: how far points moved during training, compared with optimal transport.

A path holds the positions of the same points at every step, p₀ to p_K. Optimal transport between its start and its end
is the cheapest matching of the two clouds. The excess cost of training is the Monge gap; detours lower the efficiency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.forms.coupling import gaussian, match
from keyquery.learn.inputs.targets import labels_of_column
from keyquery.reading import Reading, digest, plain, provenance, short
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress, silent

DIGITS = 4  # of the points of the page
FRAMES, POINTS = 25, 300  # steps of curves and of the page, and points on the page
CURVES = ("distance", "wasserstein", "optimality", "path_length", "efficiency")
METRICS = ("points", "distance", "wasserstein", "random", "monge_gap", *CURVES[2:], "matched", "bures")


class Course:
    """A path of points in memory or in a memory map, converted to float64 one record at a time."""

    def __init__(self, path: Any, steps: Sequence[int] | None = None) -> None:
        if not isinstance(path, (Tensor, np.ndarray, list, tuple)):
            raise TypeError(f"path must be an array (steps + 1, points, dims) or a list, got {type(path).__name__}")
        shapes = [tuple(np.shape(cloud)) for cloud in path]
        for step, shape in enumerate(shapes):
            if shape != shapes[0]:
                first = f"step 0 has shape {shapes[0]}"
                raise ValueError(f"path must have the same points at every step: {first}, step {step} {shape}")
        if len(shapes) < 2 or len(shapes[0]) != 2 or 0 in shapes[0]:
            shape = (len(shapes), *(shapes[0] if shapes else ()))
            raise ValueError(f"path must be (steps + 1, points, dims), with a start and an end, got {shape}")
        self._path, self.count = path, shapes[0][0]
        self.steps = list(range(len(shapes)) if steps is None else steps)  # the training step of every record
        before = self.positions(0)
        self.lengths = [torch.zeros_like(before[:, 0])]  # of the path of each point up to every record, float64
        for record in range(1, len(shapes)):
            now = self.positions(record)
            self.lengths.append(self.lengths[-1] + (now - before).norm(dim=-1))
            before = now

    def positions(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a record, float64."""
        cloud = self._path[record]
        points = (cloud.detach() if isinstance(cloud, Tensor) else torch.from_numpy(np.array(cloud))).double()
        if not points.isfinite().all():
            bad = int((~points.isfinite()).any(-1).sum())
            raise ValueError(f"path must be finite: at step {record}, {bad} of {len(points)} points are not")
        return points

    def ends(self) -> dict[str, str]:
        """Digests of the first and last positions, in float64."""
        return {"start": digest(self.positions(0)), "end": digest(self.positions(len(self.steps) - 1))}


@dataclass(frozen=True, kw_only=True)
class Transport(Reading, kind="transport"):
    """A path of points compared with the optimal transport from its start to its end, overall and per class.

    `curves` hold metrics of the path up to each of `steps`; `sketch` the points in two dimensions.
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
    published: bool  # numbers as in the released code
    classes: Sequence[Mapping[str, Any]]  # the same metrics per class
    exact: bool = True  # False in files of former versions, where Sinkhorn replaced the exact coupling of large classes
    unit: str = "step"  # of `steps`
    steps: Sequence[int] = ()  # at which curves are measured
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # metrics of the path up to each step
    sketch: Mapping[str, Any] | None = None  # the points in two dimensions
    heads: Sequence[Mapping[str, Any]] = ()  # of files of former versions

    def records(self) -> list[dict[str, Any]]:
        """One row overall, and one per class if there are several."""
        rows = [{"class": "all", **{name: getattr(self, name) for name in METRICS}}]
        several = self.classes if len(self.classes) > 1 else ()
        return rows + [{"class": row["class"], **{name: row[name] for name in METRICS}} for row in several]


def transport(
    path: Any,
    labels: Any = None,
    published: bool = False,
    *,
    frames: int = FRAMES,
    points: int = POINTS,
    name: str = "a path",
    progress: Progress | None = None,
) -> Transport:
    """Compare a path of points with the optimal transport from its start to its end.

    T = √(mean ‖p₀ − p_K‖²), W₂ = min of the same over matchings, Monge gap = T − W₂, optimality = W₂/T,
    efficiency = mean ‖p₀ − p_K‖ / mean path length. All in float64. The time of a coupling is cubic in the points of a
    class: 5,000 take ten seconds.

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
    name
        Name of the path. Default: "a path".
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Transport
        Metrics overall and per class, and curves over steps.

    Examples
    --------
    >>> cloud = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> straight = kq.transport([cloud, cloud + 1, cloud + 3])  # a translation
    >>> straight.optimality, round(straight.efficiency, 12)
    (1.0, 1.0)
    >>> permuted = kq.transport([cloud, cloud.roll(1, 0)])  # three points exchange positions
    >>> permuted.wasserstein, round(permuted.distance, 3), permuted.matched
    (0.0, 1.826, 0.0)
    """
    course = path if isinstance(path, Course) else Course(path)
    check_count("points", points)
    check_count("frames", frames, least=0)
    groups, last = _groups(labels, course.count), len(course.steps) - 1
    start = course.positions(0)

    def parts_at(record: int) -> list[tuple[Tensor, dict[str, float]]]:
        end, lengths = course.positions(record), course.lengths[record]
        return [_statistics(start[rows], end[rows], lengths[rows]) for rows in groups.values()]

    parts, end, target = parts_at(last), course.positions(last), torch.empty_like(start)
    for members, (partner, _) in zip(groups.values(), parts, strict=True):
        target[members] = end[members][partner]
    classes = [{"class": name, **_metrics([part], published)} for name, part in zip(groups, parts, strict=True)]
    # At most `frames` records, evenly spaced from first to last.
    spaced = np.linspace(0, last, min(max(frames, 2), last + 1)).tolist() if frames else []
    selected = sorted(set(map(round, spaced)))
    rows = [
        _metrics(parts if record == last else parts_at(record), published)
        for record in (progress or silent)(selected, "coupling steps", len(selected))
    ]
    return Transport(
        model={"name": name},
        provenance=provenance(records=len(course.steps), tensors=course.ends()),
        **_metrics(parts, published),
        published=published,
        classes=classes,
        steps=[course.steps[record] for record in selected],
        curves={name: [row[name] for row in rows] for name in CURVES},
        sketch=_sketch(course, selected, groups, target, points) if frames else None,
    )


def _groups(labels: Any, count: int) -> dict[Any, Tensor]:
    """The rows of each class, sorted by name; a single class "all" without labels."""
    if labels is None:
        return {"all": torch.arange(count)}
    names, index = np.unique(labels_of_column("labels", labels), return_inverse=True)
    if index.shape != (count,):
        raise ValueError(f"labels must have one class per point, {count}, got {len(index)}")
    return {name.item(): torch.from_numpy(np.flatnonzero(index == number)) for number, name in enumerate(names)}


def _statistics(
    start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], lengths: Float[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], dict[str, float]]:
    """The optimal partners in a class, and its means.

    The means are T², W₂², T² of random partners, ‖p₀ − p_K‖, path length, share matched to itself, and Bures².
    """
    partner = match(start, end)
    spread = sum((cloud - cloud.mean(0)).square().sum(-1).mean() for cloud in (start, end))
    means = {
        "distance": (start - end).square().sum(-1).mean(),
        "wasserstein": (start - end[partner]).square().sum(-1).mean(),
        "random": (start.mean(0) - end.mean(0)).square().sum() + spread,  # the mean over all pairs
        "straight": (start - end).norm(dim=-1).mean(),
        "length": lengths.mean(),
        "matched": (partner == torch.arange(len(start), device=partner.device)).double().mean(),
        "bures": gaussian(start, end).square(),
    }
    return partner, {"points": len(start), **{name: float(value) for name, value in means.items()}}


def _metrics(classes: Sequence[tuple[Tensor, Mapping[str, float]]], published: bool) -> dict[str, Any]:
    """Metrics of some classes together, ours or as published."""
    parts = [means for _, means in classes]
    count = sum(part["points"] for part in parts)
    mean = {name: sum(part["points"] * part[name] for part in parts) / count for name in parts[0]}
    roots = {name: mean[name] ** 0.5 for name in ("distance", "wasserstein", "random", "bures")}
    length, straight = mean["length"], mean["straight"]
    if published:
        for name in ("distance", "wasserstein", "random"):
            roots[name] = sum((part["points"] * part[name]) ** 0.5 for part in parts)
        roots["bures"] = sum(part["bures"] for part in parts)
        length, straight = count * length, roots["distance"]
    distance, wasserstein = roots["distance"], roots["wasserstein"]
    return {
        "points": count,
        **roots,
        "monge_gap": distance - wasserstein,
        "optimality": wasserstein / distance if distance else None,
        "path_length": length,
        "efficiency": min(straight / length, 1.0) if length else None,  # above 1 only by rounding
        "matched": mean["matched"],
    }


def _sketch(
    course: Course, records: Sequence[int], groups: Mapping[Any, Tensor], target: Float[Tensor, "n d"], points: int
) -> dict[str, Any]:
    """Some points at some records, projected on their two principal components.

    `frames` holds x₀, y₀, x₁, y₁, … of each record, `targets` the optimal target of each point, `classes` the class
    index of each point, `shares` the variance explained by each component.
    """
    chosen = torch.randperm(course.count, generator=torch.Generator().manual_seed(0))[:points].sort().values
    number = torch.zeros(course.count, dtype=torch.long)
    for index, rows in enumerate(groups.values()):
        number[rows] = index
    positions = torch.stack([course.positions(record)[chosen].cpu() for record in records])
    centre = positions.mean((0, 1))
    centred = (positions - centre).flatten(0, 1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # of the iterations for the leading directions
        directions = torch.svd_lowrank(centred, min(8, *centred.shape), niter=30)[2][:, :2]
    directions = torch.nn.functional.pad(directions, (0, 2 - directions.shape[1]))
    total = centred.square().sum()
    shares = (centred @ directions).square().sum(0) / (total if total > 0 else 1)
    frames = ((positions - centre) @ directions).flatten(1)
    targets = ((target[chosen].cpu() - centre) @ directions).flatten()
    drawn = {"frames": frames, "targets": targets, "classes": number[chosen], "shares": shares}
    return short(plain(drawn), DIGITS)
