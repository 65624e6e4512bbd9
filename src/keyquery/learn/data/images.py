"""Labelled images from an .npz file or from folders."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from keyquery.support.arrays import read_arrays
from keyquery.support.files import RATIO, read_bytes, regular
from keyquery.support.images import FILE, decode

SUFFIXES = (".png", ".jpg", ".jpeg")
CLASSES = 100_000
DECODED = 2**26  # bytes of all decoded images, or 100 times the bytes of their files


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images of equal size with labels, as `load_images` reads them."""

    pixels: UInt8[np.ndarray, "n h w c"]  # c = 1 for greyscale and 3 for RGB
    labels: Int64[np.ndarray, " n"] | None  # label i is `classes[i]`
    classes: tuple[str, ...] = ()  # class names

    def __len__(self) -> int:
        return len(self.pixels)

    def __repr__(self) -> str:
        _, height, width, channels = self.pixels.shape
        return f"Images({len(self)} of {height} × {width} × {channels}, {len(self.classes)} classes)"


def load_images(path: str | Path) -> Images:
    """Load images of equal size from an .npz file or a folder.

    A folder has one subfolder of .png or .jpg files per class, sorted by name (extra `images`; alpha is dropped, and if
    only some are greyscale, all become RGB); an .npz file has `images`, uint8 (n, h, w) or (n, h, w, c), and perhaps
    integer `labels` (n,) and names `classes`.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if not zipfile.is_zipfile(regular(path)):
        raise ValueError(f"{path} must be an .npz file or a folder with one subfolder per class")
    arrays = read_arrays(path)
    if "images" not in arrays:
        raise ValueError(f"{path} must hold images; it holds {', '.join(arrays) or 'nothing'}")
    pixels, labels, names = arrays["images"], arrays.get("labels"), arrays.get("classes", np.array([], dtype=str))
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.size == 0:
        shape = f"{pixels.dtype} {pixels.shape}"
        raise ValueError(f"{path}: images must be uint8 (n, h, w) or (n, h, w, c), and not empty, got {shape}")
    if names.ndim != 1 or len(names) > CLASSES:
        raise ValueError(f"{path}: classes must be at most {CLASSES} names, got {names.dtype} {names.shape}")
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != (len(pixels),)):
        raise ValueError(f"{path}: labels must be integers ({len(pixels)},), got {labels.dtype} {labels.shape}")
    if labels is not None and len(names) and not (labels.min() >= 0 and labels.max() < len(names)):
        raise ValueError(f"{path}: labels must be from 0 to {len(names) - 1}, got {labels.min()} to {labels.max()}")
    labels = None if labels is None else labels.astype(np.int64)
    return Images(pixels if pixels.ndim == 4 else pixels[..., None], labels, tuple(map(str, names)))


def _from_folder(path: Path) -> Images:
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise ValueError(f"{path} must hold one subfolder per class, and holds none")
    files, labels = [], []
    for label, folder in enumerate(folders):
        images = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        if not images:
            raise ValueError(f"{folder} holds no image; expected {', '.join(SUFFIXES)}")
        files += images
        labels += [label] * len(images)
    pixels = _decoded((str(file), read_bytes(file, FILE)) for file in files)
    return Images(pixels, np.array(labels, dtype=np.int64), tuple(folder.name for folder in folders))


def _decoded(files: Iterable[tuple[str, bytes]]) -> UInt8[np.ndarray, "n h w c"]:
    """The pixels of named files, all of the size of the first."""
    images: list[np.ndarray] = []
    encoded = decoded = 0  # bytes
    for name, data in files:
        image = decode(name, data)
        encoded, decoded = encoded + len(data), decoded + image.nbytes
        if decoded > (most := max(DECODED, RATIO * encoded)):
            raise ValueError(f"{name}: the decoded images exceed the limit of {most} bytes")
        if images and image.shape[:2] != images[0].shape[:2]:
            sizes = " × ".join(map(str, image.shape[:2])), " × ".join(map(str, images[0].shape[:2]))
            raise ValueError(f"{name} is {sizes[0]}, but the first image is {sizes[1]}: all must have the same size")
        images.append(image)
    channels = max(image.shape[2] for image in images)
    return np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])
