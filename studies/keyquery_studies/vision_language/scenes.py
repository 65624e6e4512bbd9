"""A captioned dataset made of real images: objects in a 2 × 2 grid, and captions about two neighbours.

Sentences say "left of" or "above", which have a direction, or "and" or "beside", which have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from keyquery.data import load_images
from keyquery.support.extras import optional

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIRECTED, RECIPROCAL = ("left of", "above"), ("and", "beside")
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))  # cells that are neighbours, the left or upper one first
GRIDS = 0.25  # the share of images with something in every cell
LEAST = 8  # things, so that four can be shown of which no two are kept apart
TESTED = 5  # of so many images of a thing, one is for tests


class Things(NamedTuple):
    """Images of one thing each, what they show, and what the things are called."""

    pixels: UInt8[np.ndarray, "n h w c"]
    labels: Int[np.ndarray, " n"]
    names: Sequence[str]

    def half(self, test: bool) -> Things:
        """Those for tests, or those to learn from: no image is among both."""
        rank = np.empty(len(self.labels), dtype=int)
        for label in np.unique(self.labels):
            where = np.flatnonzero(self.labels == label)
            rank[where] = np.arange(len(where))
        kept = (rank % TESTED == 0) == test
        return Things(self.pixels[kept], self.labels[kept], self.names)


class Said(NamedTuple):
    """A sentence: things and what is between them."""

    first: int
    relation: str
    second: int

    def text(self, names: Sequence[str]) -> str:
        """In words.

        >>> Said(3, "left of", 9).text(CIFAR)
        'the cat left of the truck'
        """
        return f"the {names[self.first]} {self.relation} the {names[self.second]}"

    def exchanged(self) -> Said:
        """The same of the two things exchanged."""
        return Said(self.second, self.relation, self.first)


class Scene(NamedTuple):
    """What is in the four cells of an image, row by row, −1 for nothing, and what is said of it."""

    cells: tuple[int, int, int, int]
    said: Said

    def true(self, sentence: Said) -> bool:
        """Whether a caption is true.

        >>> Scene((3, 9, -1, -1), Said(3, "left of", 9)).true(Said(9, "beside", 3))
        True
        """
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
    """Images of `kq.data.load_images`, `most` of a class; ten classes without names are those of CIFAR-10."""
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
    kept = [rng.permutation(np.flatnonzero(images.labels == label))[:most] for label in range(len(classes))]
    order = np.concatenate(kept)
    return Things(images.pixels[order], images.labels[order], classes)


def unsaid(things: int) -> set[frozenset[int]]:
    """Pairs of things that no sentence to learn from speaks of: each thing has two of those.

    >>> len(unsaid(10))
    10
    """
    return {frozenset((thing, (thing + 1) % things)) for thing in range(things)}


def scenes(things: int, count: int, seed: int, test: bool = False, grids: float = GRIDS) -> list[Scene]:
    """What to show and to say; tests speak of pairs that are never learned from, nor shown together there.

    A share `grids` has something in every cell, the others in two neighbours alone. Half of the sentences have a
    direction.
    """
    rng = np.random.default_rng((seed, int(test)))
    apart = unsaid(things)
    drawn_scenes = list[Scene]()
    while len(drawn_scenes) < count:
        cells = [-1] * 4
        if full := bool(rng.random() < grids):
            cells = rng.choice(things, 4, replace=False).tolist()
        beside = bool(rng.random() < 0.5)
        a, b = (ROWS if beside else COLUMNS)[rng.integers(2)]
        if not full:
            cells[a], cells[b] = rng.choice(things, 2, replace=False).tolist()
        there = [thing for thing in cells if thing >= 0]
        met = any(frozenset((x, y)) in apart for x in there for y in there if x != y)
        if (frozenset((cells[a], cells[b])) in apart) if test else not met:
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
