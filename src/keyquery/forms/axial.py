"""Rotary position embedding on a grid: every pair of dimensions turns with one coordinate of its token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.forms.rope import Rope

Size = tuple[int, int, int]  # frames, rows and columns: of an image, one frame


@dataclass(frozen=True)
class Layout:
    """In which order the tokens of a grid stand, and what their coordinates are.

    Parameters
    ----------
    merge
        Tokens of blocks of merge × merge stand together. Default: 1, row by row.
    window
        Blocks of windows of window × window stand together. Default: none.
    start
        The first coordinate. Default: 0.
    span
        Coordinates are stretched so that the columns span so many. Default: they count columns.
    centred
        Coordinates are those of the centres of patches, from −2π to 2π. Default: False.
    patch
        Pixels of a patch's side. Default: not known.
    cut
        The image is cut into grids of cut × cut tokens. Default: it is one grid.
    """

    merge: int = 1
    window: int | None = None
    start: int = 0
    span: int | None = None
    centred: bool = False
    patch: int | None = None
    cut: int | None = None

    def sizes(self, inputs: Mapping[str, Any]) -> list[Size] | None:
        """Frames, rows and columns of the images in a model's inputs; None if they are not known.

        >>> Layout(patch=4).sizes({"pixel_values": torch.zeros(1, 3, 8, 12)})
        [(1, 2, 3)]
        """
        if self.cut:
            return [(1, self.cut, self.cut)]
        for name in ("image_grid_thw", "grid_thw"):
            if isinstance(grids := inputs.get(name), Tensor):
                return [(int(frames), int(rows), int(columns)) for frames, rows, columns in grids.tolist()]
        pixels = inputs.get("pixel_values")
        if not isinstance(pixels, Tensor) or pixels.ndim != 4 or not self.patch:
            return None
        return [(1, pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch)]

    def coordinates(self, sizes: Sequence[Size]) -> Float[Tensor, "n 3"]:
        """Time, row and column of all tokens of some images.

        >>> Layout(merge=2).coordinates([(1, 2, 4)])[:, 1:].int().tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
        """
        return torch.cat([self._of_image(*size) for size in sizes])

    def _of_image(self, frames: int, rows: int, columns: int) -> Tensor:
        if rows % self.merge or columns % self.merge:
            raise ValueError(f"a grid of {rows} × {columns} is not made of blocks of {self.merge} × {self.merge}")
        tokens = torch.arange(frames * rows * columns)
        blocks = tokens.reshape(frames, rows // self.merge, self.merge, columns // self.merge, self.merge)
        blocks = blocks.transpose(2, 3).flatten(3)
        order = torch.cat(list(_windows(blocks, self.window))) if self.window else blocks.flatten()
        places = torch.stack(torch.unravel_index(order, (frames, rows, columns)), -1).double()
        if self.centred:
            sizes = torch.tensor([1, rows, columns], dtype=torch.float64)
            return 2 * math.pi * (2 * (places + 0.5) / sizes - 1)
        return (places + self.start) * (self.span / columns if self.span else 1)


def _windows(blocks: Int[Tensor, "frames rows columns tokens"], size: int) -> Sequence[Int[Tensor, " n"]]:
    """The tokens of each window; windows at the edges may be smaller."""
    frames, rows, columns, _ = blocks.shape
    return [
        blocks[frame, row : row + size, column : column + size].flatten()
        for frame in range(frames)
        for row in range(0, rows, size)
        for column in range(0, columns, size)
    ]


@dataclass(frozen=True, eq=False)
class PlacedRope(Rope):
    """RoPE of tokens whose angles are known one by one; positions are numbers of tokens."""

    table: Float[Tensor, "tokens pairs"] = field(default_factory=lambda: torch.zeros(0, 0))

    def angles(self, position: float | Tensor) -> Float[Tensor, "*positions pairs"]:
        """The angles of tokens."""
        return self.table.to(position.device)[position] if isinstance(position, Tensor) else self.table[int(position)]


@dataclass(frozen=True, eq=False)
class AxialRope:
    """RoPE on a grid: pair i turns by ω_i times the coordinate `axes[i]` (0 time, 1 row, 2 column) of its token.

    A score depends on the offsets of two tokens in all coordinates, and not on one offset: `on` gives the rotation for
    the tokens of a grid.

    Parameters
    ----------
    rope
        Dimensions, frequencies, and which dimensions are a pair.
    axes
        Of each pair.
    layout
        Order and coordinates of the tokens.
    before, after
        Angles of tokens that have no place, which stand before or behind the others. Default: none.

    Examples
    --------
    >>> rope = AxialRope(kq.Rope(4, frequencies=torch.ones(2)), torch.tensor([1, 2]))
    >>> rope.on([(1, 2, 2)]).angles(torch.arange(4)).tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """

    rope: Rope
    axes: Int[Tensor, " pairs"]
    layout: Layout = field(default_factory=Layout)
    before: Float[Tensor, "tokens pairs"] | None = None
    after: Float[Tensor, "others pairs"] | None = None

    def on(self, sizes: Sequence[Size]) -> PlacedRope:
        """The rotation of the tokens of some images, of frames × rows × columns each."""
        assert self.rope.frequencies is not None
        angles = self.layout.coordinates(sizes)[:, self.axes] * self.rope.frequencies.double()
        table = torch.cat([part.double() for part in (self.before, angles, self.after) if part is not None])
        rope = self.rope
        return PlacedRope(rope.dims, rope.base, rope.interleaved, rope.frequencies, rope.factor, table=table)
