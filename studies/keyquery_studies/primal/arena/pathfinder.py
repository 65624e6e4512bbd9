"""Pathfinder: two long dashed paths among shorter ones, two marks: do they lie on the same path?

Parameters of the published generator at 32 × 32 ("contour-14"): frame 1 pixel, paths of 14 dashes of length 2 with
gaps of 1, thickness ½, contrast 2 · ¾; up to 5 distractor paths of 4 dashes, with 4 trials each; marks of radius 1½;
the first path starts at least 14 pixels from every side, the second 7 pixels from that start; continuity 1. The marks
are at the start of a path and at its end, or the end of the other, with equal probability. Different here: how a path
is continued (a turn of up to 1 radian, uniform; the first free one of 8), a clearance of 2 pixels between lines of
different paths and non-adjacent lines of one path, that the two long paths are drawn one after the other, and the
rasterisation of lines (coverage by distance). An image without room for both long paths is rejected.

Labels are exact: on the undashed lines (`Drawing.filled`), a flood fill from one mark reaches the other, or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

SIZE = 32
FRAME = 1.0
DASHES, DASH, GAP = 14, 2.0, 1.0
THICKNESS, CONTRAST = 0.5, 2 * 0.75
OTHERS, OTHER_DASHES = 20 // (14 // 3), 14 // 3
TRIALS = 4  # of each path
MARK = 1.5
APART = 7.0
TURN = 1.0  # radians
CLEAR = 2.0
TRIES = 8  # candidate continuations of a path; the first free one is taken
FINE = 3  # cells per pixel of the occupancy grid and of filled paths
CELLS = SIZE * FINE
ATTEMPTS = 256  # images sampled at once
PITCH = DASH + GAP
Points = Float64[np.ndarray, "images _ 2"]  # paths have different lengths


@dataclass(frozen=True, eq=False)
class Drawing:
    """Images, labels and the geometry they were drawn from; points of missing paths are NaN."""

    images: UInt8[np.ndarray, "images 32 32"]
    labels: UInt8[np.ndarray, " images"]
    marks: Float64[np.ndarray, "images 2 2"]
    paths: list[Points]  # the corners of each, rows and columns in pixels

    def filled(self, image: int) -> Bool[np.ndarray, "cells cells"]:
        """An image's paths without gaps, at 3 cells per pixel; lines of different paths never touch."""
        cells = np.zeros((CELLS, CELLS), bool)
        along = np.linspace(0, 1, 4 * round(PITCH) * FINE)[:, None, None]
        for path in self.paths:
            corners = path[image]
            points = (corners[:-1] + along * (corners[1:] - corners[:-1])).reshape(-1, 2)
            at = np.floor(points[~np.isnan(points[:, 0])] * FINE).astype(int)
            cells[at[:, 0], at[:, 1]] = True
        return cells


def pathfinder(count: int, seed: Any) -> tuple[UInt8[np.ndarray, "count n"], UInt8[np.ndarray, " count"]]:
    """Images as sequences of 1,024 intensities, and labels: 1 if both marks lie on one path."""
    rng = np.random.default_rng(seed)
    tokens = [np.zeros((0, SIZE * SIZE), np.uint8)]
    labels = [np.zeros(0, np.uint8)]
    count_kept = 0
    while count_kept < count:
        drawing = draw(rng)
        tokens.append(drawing.images.reshape(-1, SIZE * SIZE))
        labels.append(drawing.labels)
        count_kept += len(drawing.labels)
    return np.concatenate(tokens)[:count], np.concatenate(labels)[:count]


def draw(rng: np.random.Generator) -> Drawing:
    """The images of 256 attempts that have room for both long paths."""
    room = _Room(np.zeros((ATTEMPTS, CELLS, CELLS), bool))
    first, second = _two(rng, room)
    others = [
        _placed(rng, room, lambda: rng.uniform(FRAME, SIZE - FRAME, (len(first), 2)), OTHER_DASHES)
        for _ in range(OTHERS)
    ]
    labels = rng.integers(2, size=len(first))
    swap = rng.random((len(first), 1, 1)) < 0.5  # the second had less room, which must not leak the label
    marked, other = np.where(swap, second, first), np.where(swap, first, second)
    marks = np.stack((marked[:, 0], np.where(labels[:, None] == 1, marked[:, -1], other[:, -1])), 1)
    canvas = np.zeros((len(first), SIZE, SIZE))
    for path in (first, second, *others):
        for dash in range(path.shape[1] - 1):
            start, step = path[:, dash], (path[:, dash + 1] - path[:, dash]) / PITCH
            _line(canvas, start + step * GAP / 2, step * DASH, THICKNESS / 2, CONTRAST)
    for mark in marks.transpose(1, 0, 2):
        _line(canvas, mark, np.zeros_like(mark), MARK, 1.0)
    images = np.rint(canvas * 255).astype(np.uint8)
    return Drawing(images, labels.astype(np.uint8), marks, [first, second, *others])


def _disc() -> Int64[np.ndarray, "cells 2"]:
    """Offsets of the cells within the clearance of an occupied one."""
    reach = int(CLEAR * FINE)
    square = np.argwhere(np.ones((2 * reach + 1,) * 2)) - reach
    return square[(square**2).sum(1) <= reach**2]


DISC = _disc()


class _Room:
    """Occupancy grid: the cells of each image within the clearance of an existing line."""

    def __init__(self, taken: Bool[np.ndarray, "images cells cells"]) -> None:
        self.taken = taken

    def keep(self, images: Bool[np.ndarray, " images"]) -> None:
        """Drop the other images."""
        self.taken = self.taken[images]

    def copy(self, images: Int64[np.ndarray, " some"]) -> _Room:
        """A copy for some images, to try paths in."""
        return _Room(self.taken[images])

    def free(self, rows: np.ndarray, points: np.ndarray) -> Bool[np.ndarray, "images tries"]:
        """Whether all points (images, tries, points, 2) lie inside the frame and far enough from other lines."""
        inside = ((points >= FRAME) & (points <= SIZE - FRAME)).all(-1)
        at = (points.clip(0, SIZE - 1e-9) * FINE).astype(int)
        return (inside & ~self.taken[rows[:, None, None], at[..., 0], at[..., 1]]).all(-1)

    def take(self, rows: np.ndarray, points: Points) -> None:
        """Occupy the surroundings of points in some images; NaN is ignored."""
        row, _ = valid = np.nonzero(~np.isnan(points[..., 0]))
        at = ((points[valid] * FINE).astype(int)[:, None] + DISC).clip(0, CELLS - 1)
        self.taken[rows[row][:, None], at[..., 0], at[..., 1]] = True


def _two(rng: np.random.Generator, room: _Room) -> tuple[Points, Points]:
    """Two long paths whose starts are 7 pixels apart, in the images that have room for both; others are dropped.

    The first starts in the middle, 14 pixels from all sides, as published.
    """
    start = rng.uniform(2 * APART, SIZE - 2 * APART, (ATTEMPTS, 2))
    first = _placed(rng, room, lambda: start, DASHES)
    room.keep(placed := _is_there(first))
    first = first[placed]
    second = _placed(rng, room, lambda: first[:, 0] + APART * _unit(rng.uniform(0, 2 * np.pi, len(first))), DASHES)
    room.keep(placed := _is_there(second))
    return first[placed], second[placed]


def _placed(rng: np.random.Generator, room: _Room, starts: Callable[[], np.ndarray], dashes: int) -> Points:
    """A path in each image, its corners (images, dashes + 1, 2); NaN if there was no room in four trials."""
    path = np.full((len(room.taken), dashes + 1, 2), np.nan)
    for _ in range(TRIALS):
        lacking = np.nonzero(~_is_there(path))[0]
        path[lacking] = _grown(rng, room, lacking, starts()[lacking], dashes)
    along = _along()
    for dash in range(dashes):
        room.take(np.arange(len(path)), _between(path[:, dash : dash + 2], along))
    return path


def _grown(
    rng: np.random.Generator, room: _Room, images: Int64[np.ndarray, " grown"], start: np.ndarray, dashes: int
) -> Float64[np.ndarray, "grown corners 2"]:
    """A path from each start in some of the images, complete or all NaN."""
    trial = room.copy(images)
    path = np.full((len(images), dashes + 1, 2), np.nan)
    rows = np.arange(len(images))
    along = _along()
    path[:, 0] = start
    angle = rng.uniform(0, 2 * np.pi, len(images))
    rows = rows[trial.free(rows, start[:, None, None])[:, 0]]
    for dash in range(dashes):
        wide = np.pi if dash == 0 else TURN
        angles = angle[rows, None] + rng.uniform(-wide, wide, (len(rows), TRIES))
        steps = PITCH * _unit(angles)
        free = trial.free(rows, path[rows, dash, None, None] + along * steps[:, :, None])
        chosen, on = free.argmax(1), np.nonzero(free.any(1))[0]
        rows, chosen = rows[on], chosen[on]
        path[rows, dash + 1] = path[rows, dash] + steps[on, chosen]
        angle[rows] = angles[on, chosen]
        if dash:  # a path may be near its last dash only
            trial.take(rows, _between(path[rows, dash - 1 : dash + 1], along))
    path[np.isnan(path).any((1, 2))] = np.nan
    return path


def _is_there(path: Points) -> Bool[np.ndarray, " images"]:
    return ~np.isnan(path[:, 0, 0])


def _along() -> Float64[np.ndarray, "points 1"]:
    """Relative positions on a dash and its gap, one per pixel, without the start."""
    return np.linspace(0, 1, round(PITCH) + 1)[1:, None]


def _between(ends: Float64[np.ndarray, "images 2 2"], along: np.ndarray) -> Points:
    """Points of a line, including its start."""
    start, end = ends[:, :1], ends[:, 1:]
    return np.concatenate((start, start + along * (end - start)), 1)


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.stack((np.sin(angle), np.cos(angle)), -1)


def _line(canvas: np.ndarray, start: np.ndarray, step: np.ndarray, radius: float, contrast: float) -> None:
    """Draw a line into every image: intensity is a pixel's coverage, by the distance of its centre."""
    reach = int(np.ceil(DASH / 2 + radius + 1))
    middle = start + step / 2
    valid = ~np.isnan(middle[:, 0])
    window = np.argwhere(np.ones((2 * reach + 1,) * 2)) - reach
    at = np.floor(middle[valid]).astype(int)[:, None] + window
    away = at + 0.5 - start[valid, None]
    along = step[valid, None]
    length = (along**2).sum(-1)
    share = ((away * along).sum(-1) / np.where(length > 0, length, 1.0)).clip(0, 1)
    distance = np.linalg.norm(away - share[..., None] * along, axis=-1)
    covered = contrast * (radius + 0.5 - distance).clip(0, min(2 * radius, 1.0))
    inside = ((at >= 0) & (at < SIZE)).all(-1)
    image = np.broadcast_to(np.nonzero(valid)[0][:, None], inside.shape)[inside]
    y, x = at[inside].T
    canvas[image, y, x] = np.maximum(canvas[image, y, x], covered[inside].clip(0, 1))
