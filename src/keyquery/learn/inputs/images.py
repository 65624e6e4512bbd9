"""Images of any size and mode as one uint8 RGB array of one size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from keyquery.learn.data.images import Images
from keyquery.support.images import pixels_of, read_image

CHANNELS = {1: "grey", 2: "grey and alpha", 3: "colour", 4: "colour and alpha"}


def images_of(images: Any, size: int) -> UInt8[Tensor, "n 3 size size"]:
    """Validated RGB images, resized to `size` × `size` pixels by antialiased bilinear interpolation; alpha is dropped.

    `images` is an array (n, h, w) or (n, h, w, c), a `kq.data.Images`, or a list of arrays (h, w) or (h, w, c), Pillow
    images or paths, of any sizes. Arrays are uint8, or floats from 0 to 1.
    """
    if isinstance(images, Images):
        images = images.pixels
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray) and images.dtype != object:
        alone = images.ndim == 3 and images.shape[-1] in (3, 4)  # one RGB image, not greyscale images 3 pixels wide
        if images.ndim not in (3, 4) or alone:
            raise ValueError(f"images must be (n, h, w) or (n, h, w, c), got {images.shape}: pass one image as [image]")
        return _sized(_colour("images", images if images.ndim == 4 else images[..., None]), size)
    if isinstance(images, (str, Path)) or not isinstance(images, (Sequence, np.ndarray)):
        raise TypeError(
            f"images must be an array or a list of images, got {type(images).__name__}: pass one image as [image]"
        )
    if not len(images):
        raise ValueError("images must hold at least one image, got none")
    return torch.cat([_sized(_image(f"images[{number}]", image), size) for number, image in enumerate(images)])


def _image(name: str, image: Any) -> UInt8[np.ndarray, "1 h w 3"]:
    if isinstance(image, (str, Path)):
        return read_image(image)[None]
    if hasattr(image, "convert") and hasattr(image, "mode"):  # a Pillow image
        return _colour(name, pixels_of(name, image)[None])
    pixels = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if pixels.ndim not in (2, 3):
        raise ValueError(f"{name} must be (h, w) or (h, w, c), a path, or a Pillow image, got shape {pixels.shape}")
    return _colour(name, pixels[None] if pixels.ndim == 3 else pixels[None, ..., None])


def _colour(name: str, pixels: np.ndarray) -> UInt8[np.ndarray, "n h w 3"]:
    if pixels.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {pixels.shape}")
    if (channels := pixels.shape[-1]) not in CHANNELS:
        known = ", ".join(f"{count} ({meaning})" for count, meaning in CHANNELS.items())
        raise ValueError(f"{name} must have its channels last, {known}, got shape {pixels.shape}")
    if pixels.dtype.kind == "f":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError(f"{name}: floats must be from 0 to 1, got {pixels.min():g} to {pixels.max():g}")
        pixels = np.rint(255 * pixels).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"{name} must be uint8, or floats from 0 to 1, got {pixels.dtype}")
    return np.repeat(pixels[..., :1], 3, -1) if channels < 3 else pixels[..., :3]


def _sized(pixels: UInt8[np.ndarray, "n h w 3"], size: int) -> UInt8[Tensor, "n 3 size size"]:
    rows = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2)
    if rows.shape[-2:] == (size, size):
        return rows.contiguous()
    parts = [
        interpolate(chunk.float(), (size, size), mode="bilinear", antialias=True).round().clamp(0, 255).to(torch.uint8)
        for chunk in rows.split(256)
    ]
    return torch.cat(parts)
