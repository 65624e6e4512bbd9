"""One image file as pixels, with limits on what a file can make Pillow do."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from keyquery.support.extras import optional
from keyquery.support.files import read_bytes

FORMATS = ("PNG", "JPEG")  # Pillow runs external programs for some other formats
PIXELS = 2**24  # per image
FILE = 2**28  # bytes per image file
SCANS = 500  # per JPEG: each costs a full decode, and real files have about ten


def read_image(path: str | Path) -> UInt8[np.ndarray, "h w 3"]:
    """Load a .png or .jpg file as RGB; greyscale is repeated, palettes are resolved, alpha is dropped."""
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no image {path}")
    pixels = decode(str(path), read_bytes(path, FILE))
    return np.repeat(pixels, 3, -1) if pixels.shape[-1] == 1 else pixels


def decode(name: str, data: bytes) -> UInt8[np.ndarray, "h w c"]:
    """The pixels of an encoded image; `name` is for errors."""
    library = optional("PIL.Image", "decoding images")
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > SCANS:
        raise ValueError(f"{name} has more than {SCANS} scans, the limit")
    try:
        image = library.open(io.BytesIO(data), formats=FORMATS)
        large = math.prod(image.size) > PIXELS
        if not large:
            image.load()
    except Exception as error:  # Pillow raises errors of many types for damaged files
        raise ValueError(f"{name} is not an image that Pillow can decode: {error}") from None
    if large:
        raise ValueError(f"{name} has {image.size[0]} × {image.size[1]} pixels; the limit is {PIXELS}")
    return pixels_of(name, image)


def pixels_of(name: str, image: Any) -> UInt8[np.ndarray, "h w c"]:
    """The pixels of a Pillow image, c = 1 for greyscale and 3 for RGB; palettes are resolved, alpha is dropped."""
    if image.mode[0] in "IF":
        raise ValueError(f"{name} must have 8 bits per channel, got mode {image.mode}")
    pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    return pixels if pixels.ndim == 3 else pixels[..., None]
