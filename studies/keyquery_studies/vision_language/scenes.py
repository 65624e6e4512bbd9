"""A captioned dataset composed of real images: objects in a 2 × 2 grid, and captions about two neighbours.

Relations are directed ("left of", "above") or symmetric ("and", "beside").
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from keyquery.learn.data import load_images
from keyquery.support.extras import optional

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIRECTED, RECIPROCAL = ("left of", "above"), ("and", "beside")
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))  # cells that are neighbours, the left or upper one first
GRIDS = 0.25  # share of images with an object in every cell
LEAST = 8  # classes, so that four can be shown without a held-out pair
TESTED = 5  # one in so many images of a class is for testing


class Things(NamedTuple):
    """Images of one object each, their class labels, and class names."""

    pixels: UInt8[np.ndarray, "n h w c"]
    labels: Int[np.ndarray, " n"]
    names: Sequence[str]

    def half(self, test: bool) -> Things:
        """The test images, or the training images; they are disjoint."""
        rank = np.empty(len(self.labels), dtype=int)
        for label in np.unique(self.labels):
            where = np.flatnonzero(self.labels == label)
            rank[where] = np.arange(len(where))
        chosen = (rank % TESTED == 0) == test
        return Things(self.pixels[chosen], self.labels[chosen], self.names)


class Said(NamedTuple):
    """A caption: two objects and their relation."""

    first: int
    relation: str
    second: int

    def text(self, names: Sequence[str]) -> str:
        """The caption as text."""
        return f"the {names[self.first]} {self.relation} the {names[self.second]}"

    def exchanged(self) -> Said:
        """The caption with its two objects exchanged."""
        return Said(self.second, self.relation, self.first)


class Scene(NamedTuple):
    """The objects in the four cells of an image, row by row, −1 for none, and its caption."""

    cells: tuple[int, int, int, int]
    said: Said

    def true(self, sentence: Said) -> bool:
        """Whether a caption is true."""
        if sentence.relation == "and":
            return sentence.first in self.cells and sentence.second in self.cells
        pairs = {"left of": ROWS, "above": COLUMNS, "beside": (*ROWS, *((b, a) for a, b in ROWS))}[sentence.relation]
        return any((self.cells[a], self.cells[b]) == (sentence.first, sentence.second) for a, b in pairs)


def digits() -> Things:
    """The handwritten digits of scikit-learn, 8 × 8, in 8 bits."""
    bunch = optional("sklearn.datasets", "the data set digits").load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return Things(pixels, bunch.target.astype(np.int64), DIGITS)


def cifar(path: str | Path, most: int = 5000) -> Things:
    """Images of `kq.data.load_images`, at most `most` per class; ten unnamed classes are those of CIFAR-10."""
    images = load_images(path)
    if images.labels is None:
        raise ValueError(f"{path} has no labels, which the captions need")
    classes = images.classes or CIFAR
    if len(classes) <= images.labels.max():
        raise ValueError(f"{path} has {images.labels.max() + 1} classes without names, which only ten may have")
    if len(classes) < LEAST:
        raise ValueError(
            f"{path} must have at least {LEAST} classes, since some pairs are kept for testing, got {len(classes)}"
        )
    rng = np.random.default_rng(0)
    by_class = [rng.permutation(np.flatnonzero(images.labels == label))[:most] for label in range(len(classes))]
    order = np.concatenate(by_class)
    return Things(images.pixels[order], images.labels[order], classes)


def unsaid(things: int) -> set[frozenset[int]]:
    """Held-out pairs of classes, which no training caption mentions: every class is in two of them."""
    return {frozenset((thing, (thing + 1) % things)) for thing in range(things)}


def scenes(things: int, count: int, seed: int, test: bool = False, grids: float = GRIDS) -> list[Scene]:
    """Scenes with captions; test captions are about held-out pairs, which never occur together in training scenes.

    A share `grids` has an object in every cell, the others in two neighbouring cells only. Half of the captions are
    directed.
    """
    rng = np.random.default_rng((seed, int(test)))
    held_out = unsaid(things)
    drawn_scenes = list[Scene]()
    while len(drawn_scenes) < count:
        cells = [-1] * 4
        if full := bool(rng.random() < grids):
            cells = rng.choice(things, 4, replace=False).tolist()
        beside = bool(rng.random() < 0.5)
        a, b = (ROWS if beside else COLUMNS)[rng.integers(2)]
        if not full:
            cells[a], cells[b] = rng.choice(things, 2, replace=False).tolist()
        shown = [thing for thing in cells if thing >= 0]
        leaks = any(frozenset((x, y)) in held_out for x in shown for y in shown if x != y)
        if (frozenset((cells[a], cells[b])) in held_out) if test else not leaks:
            drawn_scenes.append(Scene((cells[0], cells[1], cells[2], cells[3]), _said(cells[a], cells[b], beside, rng)))
    return drawn_scenes


def _said(first: int, second: int, beside: bool, rng: np.random.Generator) -> Said:
    if rng.random() < 0.5:
        return Said(first, DIRECTED[0 if beside else 1], second)
    sentence = Said(first, RECIPROCAL[int(beside and rng.random() < 0.5)], second)
    return sentence.exchanged() if rng.random() < 0.5 else sentence


def drawn(things: Things, wanted: Sequence[Scene], seed: int) -> UInt8[np.ndarray, "n h w c"]:
    """Images of scenes, with a randomly drawn image of each object."""
    rng = np.random.default_rng((seed, 7))
    height, width, channels = things.pixels.shape[1:]
    members = {label: np.flatnonzero(things.labels == label) for label in range(len(things.names))}
    canvas = np.zeros((len(wanted), 2 * height, 2 * width, channels), np.uint8)
    for place, scene in enumerate(wanted):
        for cell, thing in enumerate(scene.cells):
            if thing >= 0:
                y, x = height * (cell // 2), width * (cell % 2)
                canvas[place, y : y + height, x : x + width] = things.pixels[rng.choice(members[thing])]
    return canvas
