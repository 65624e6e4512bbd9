"""Images with labels, from an .npz file or from folders."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from keyquery.support.arrays import read_arrays
from keyquery.support.extras import optional
from keyquery.support.files import RATIO, read_bytes, regular

SUFFIXES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")  # of what Pillow knows: some others are programs
CLASSES = 100_000
PIXELS = 2**24  # of one image
DECODED = 2**26  # bytes of all images, or 100 times those of their files
FILE = 2**28  # bytes of one image's file
SCANS = 500  # of one JPEG: each takes as long as the image is large, and real ones have about ten


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """`pixels` (n, h, w, c), c = 1 for grey and 3 for colour; `labels` (n,) or None; label i means `classes[i]`."""

    pixels: UInt8[np.ndarray, "n h w c"]
    labels: Int64[np.ndarray, " n"] | None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)

    def __repr__(self) -> str:
        _, height, width, channels = self.pixels.shape
        return f"Images({len(self)} of {height} × {width} × {channels}, {len(self.classes)} classes)"


def load_images(path: str | Path) -> Images:
    """Images of equal size, from one of three places.

    - An .npz file with `images`, uint8 (n, h, w) or (n, h, w, c).
    - An .npz file with `jpeg`, the bytes of all files one after the other, and `offsets` (n + 1,): image i is
      jpeg[offsets[i]:offsets[i + 1]].
    - A folder with one subfolder a class, which holds .png or .jpg files; classes and files are sorted by name.

    An .npz file may hold integer `labels` (n,) and names `classes`. Files are decoded by Pillow (the extra `images`),
    without their alpha; where only some are grey, all become colour.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "a.npz"), images=np.zeros((5, 8, 8), np.uint8), labels=np.arange(5))
    ...     load_images(Path(folder, "a.npz")).pixels.shape
    (5, 8, 8, 1)
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if not zipfile.is_zipfile(regular(path)):
        raise ValueError(f"{path} must be an .npz file or a folder with one subfolder a class")
    arrays = read_arrays(path)
    found = ", ".join(arrays)
    if "images" in arrays:
        pixels = _as_pixels(path, arrays["images"])
    elif {"jpeg", "offsets"} <= set(arrays):
        pixels = _unpacked(path, arrays["jpeg"], arrays["offsets"])
    else:
        raise ValueError(f"{path} must hold images, or jpeg and offsets; it holds {found or 'nothing'}")
    names = arrays.get("classes", np.array([], dtype=str))
    if names.ndim != 1 or len(names) > CLASSES:
        raise ValueError(f"{path}: classes must be at most {CLASSES} names, got {names.dtype} {names.shape}")
    classes = tuple(map(str, names))
    return Images(pixels, _as_labels(path, arrays.get("labels"), len(pixels), classes), classes)


def read_image(path: str | Path) -> UInt8[np.ndarray, "h w 3"]:
    """One image file in colour, whatever its mode: grey is repeated, a palette looked up, alpha dropped.

    >>> from tempfile import TemporaryDirectory
    >>> from PIL import Image
    >>> with TemporaryDirectory() as folder:
    ...     Image.new("P", (5, 3)).save(Path(folder, "a.png"))
    ...     read_image(Path(folder, "a.png")).shape
    (3, 5, 3)
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no image {path}")
    pixels = _decode(_pillow(), str(path), read_bytes(path, FILE))
    return np.repeat(pixels, 3, -1) if pixels.shape[-1] == 1 else pixels


def _as_pixels(path: Path, images: np.ndarray) -> UInt8[np.ndarray, "n h w c"]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.size == 0:
        found = f"{images.dtype} {images.shape}"
        raise ValueError(f"{path}: images must be uint8 (n, h, w) or (n, h, w, c), and not empty, got {found}")
    return images if images.ndim == 4 else images[..., None]


def _as_labels(
    path: Path, labels: np.ndarray | None, count: int, classes: tuple[str, ...]
) -> Int64[np.ndarray, " n"] | None:
    if labels is None:
        return None
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        raise ValueError(f"{path}: labels must be integers ({count},), got {labels.dtype} {labels.shape}")
    if classes and not (labels.min() >= 0 and labels.max() < len(classes)):
        raise ValueError(f"{path}: labels must be from 0 to {len(classes) - 1}, got {labels.min()} to {labels.max()}")
    return labels.astype(np.int64)


def _unpacked(path: Path, jpeg: np.ndarray, offsets: np.ndarray) -> UInt8[np.ndarray, "n h w c"]:
    if jpeg.dtype != np.uint8 or jpeg.ndim != 1:
        raise ValueError(f"{path}: jpeg must be uint8 (bytes,), got {jpeg.dtype} {jpeg.shape}")
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"{path}: offsets must be integers (n + 1,), got {offsets.dtype} {offsets.shape}")
    if offsets[0] < 0 or offsets[-1] > len(jpeg) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{path}: offsets must rise from 0 to at most {len(jpeg)}, the bytes of jpeg")
    return _decoded((f"{path}, image {i}", jpeg[a:b].tobytes()) for i, (a, b) in enumerate(pairwise(offsets)))


def _from_folder(path: Path) -> Images:
    folders = sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not folders:
        raise ValueError(f"{path} must hold one subfolder a class, and holds none")
    files, labels = [], []
    for label, folder in enumerate(folders):
        found = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{folder} holds no image; expected {', '.join(SUFFIXES)}")
        files += found
        labels += [label] * len(found)
    pixels = _decoded((str(file), read_bytes(file, FILE)) for file in files)
    return Images(pixels, np.array(labels, dtype=np.int64), tuple(folder.name for folder in folders))


def _decoded(files: Iterable[tuple[str, bytes]]) -> UInt8[np.ndarray, "n h w c"]:
    """The pixels of named files; the first says how large all must be."""
    library = _pillow()
    images: list[np.ndarray] = []
    given = made = 0
    for name, data in files:
        image = _decode(library, name, data)
        given, made = given + len(data), made + image.nbytes
        if made > (most := max(DECODED, RATIO * given)):
            raise ValueError(f"{name}: the images up to it come to more than {most} bytes, which is refused")
        if images and image.shape[:2] != images[0].shape[:2]:
            sizes = " × ".join(map(str, image.shape[:2])), " × ".join(map(str, images[0].shape[:2]))
            raise ValueError(f"{name} is {sizes[0]}, but the first image is {sizes[1]}: all must have one size")
        images.append(image)
    channels = max(image.shape[2] for image in images)
    return np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])


def _pillow() -> Any:
    return optional("PIL.Image", "decoding images")


def _decode(library: Any, name: str, data: bytes) -> UInt8[np.ndarray, "h w c"]:
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > SCANS:
        raise ValueError(f"{name} has more than {SCANS} scans, which is refused")
    try:
        image = library.open(io.BytesIO(data), formats=FORMATS)
        large = math.prod(image.size) > PIXELS
        if not large:
            image.load()
    except Exception as error:  # Pillow raises whatever a broken file makes it stumble over
        raise ValueError(f"{name} is no image that Pillow can decode: {error}") from None
    if large:
        raise ValueError(f"{name} has {image.size[0]} × {image.size[1]} pixels; at most {PIXELS} are read")
    return pixels_of(name, image)


def pixels_of(name: str, image: Any) -> UInt8[np.ndarray, "h w c"]:
    """The pixels of an image of Pillow, c = 1 for grey and 3 for colour: a palette is looked up, alpha dropped.

    >>> from PIL import Image
    >>> pixels_of("a", Image.new("RGBA", (5, 3))).shape
    (3, 5, 3)
    """
    if image.mode[0] in "IF":
        raise ValueError(f"{name} must have 8 bits a channel, got mode {image.mode}")
    pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    return pixels if pixels.ndim == 3 else pixels[..., None]
