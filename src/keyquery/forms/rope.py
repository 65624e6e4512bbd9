"""Rotary position embedding (RoPE), in a sequence and on a grid; the energies of a form M(Δ) = QᵀR(Δ)K per offset.

Energies follow from the Gram matrix of [Q; K] (on data, from the covariance of queries and keys), with blocks Gq, Gk
and C = KQᵀ, and a rotation R of r dimensions:

    ‖M(Δ)‖² = tr(Gq R Gk Rᵀ)      tr(M(Δ)²) = tr(R C R C)      ⟨M(Δ), M(−Δ)ᵀ⟩ = tr(R C Rᵀ C)

The second compares two contents swapped at the same offset, the third two tokens swapped together with their positions,
as s_ij and s_ji of a running model are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from keyquery.forms.display import brief
from keyquery.support.checks import check_count, check_float, check_number

Size = tuple[int, int, int]  # frames, rows and columns: of an image, one frame


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: rotation R(t) of pairs of dimensions of a head by the angles t·ω.

        (R(m) q)·(R(n) k) = qᵀR(n − m)k,   ω_i = base^(−2i/dims)

    Parameters
    ----------
    dims
        Number of rotated dimensions, even; dimensions beyond are unchanged.
    base
        Default: 10000.
    interleaved
        Pairs are (2i, 2i + 1), not (i, i + dims/2). Default: False.
    frequencies
        ω (dims/2,). Default: base^(−2i/dims).
    factor
        Multiplies cosine and sine, as the attention factor of YaRN: scores grow by factor². Default: 1.

    See Also
    --------
    Attention : takes it as `rope=`.

    Examples
    --------
    >>> kq.Rope(dims=4).angles(1.0)
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """

    dims: int
    base: float = 10000.0
    interleaved: bool = False
    frequencies: Float[Tensor, " pairs"] | None = None
    factor: float = 1.0

    __repr__ = brief

    def __post_init__(self) -> None:
        check_count("dims", self.dims, least=2)
        if self.dims % 2:
            raise ValueError(f"dims must be even, since dimensions are rotated in pairs, got {self.dims}")
        for name in ("base", "factor"):
            check_number(name, getattr(self, name))
        if self.base <= 0:
            raise ValueError(f"base must be positive, got {self.base}")
        if self.frequencies is not None:
            check_float("frequencies", self.frequencies, "pairs", pairs=self.dims // 2)

    def angles(self, position: float | Shaped[Tensor, "*positions"]) -> Float[Tensor, "*positions pairs"]:
        """t·ω per pair, in float64, with one more dimension than `position`."""
        # On the device of the positions, to avoid a copy.
        device = position.device if isinstance(position, Tensor) else None
        if self.frequencies is None:
            exponents = torch.arange(0, self.dims, 2, dtype=torch.float64, device=device) / self.dims
            frequencies = self.base**-exponents
        else:
            frequencies = self.frequencies.double().to(device)
        position = torch.as_tensor(position, dtype=torch.float64, device=frequencies.device)
        return position.unsqueeze(-1) * frequencies

    def rotate(
        self, x: Float[Tensor, "*#batch r"], position: float | Shaped[Tensor, "*#batch"]
    ) -> Float[Tensor, "*out r"]:
        """R(t)·x for vectors x (..., r); `position` is a number, or a tensor that broadcasts to x's leading shape."""
        return self._turned(x, self.angles(position))

    def back(
        self, x: Float[Tensor, "*#batch r"], position: float | Shaped[Tensor, "*#batch"]
    ) -> Float[Tensor, "*out r"]:
        """R(−t)·x, likewise."""
        return self._turned(x, -self.angles(position))

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """Pairs of dimensions turned by their angles."""
        if x.shape[-1] < self.dims:
            raise ValueError(f"rope rotates {self.dims} dimensions, but the head has {x.shape[-1]}")
        angles = angles.to(x.device)
        cos, sin = (self.factor * angles.cos()).to(x.dtype), (self.factor * angles.sin()).to(x.dtype)
        rotated, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotated.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((out, rest.expand(*out.shape[:-1], -1)), dim=-1)


@dataclass(frozen=True)
class Layout:
    """In which order the tokens of a grid stand, and what their coordinates are."""

    merge: int = 1
    window: int | None = None
    start: int = 0
    span: int | None = None
    centred: bool = False
    patch: int | None = None
    cut: int | None = None

    def merged(self, inputs: Mapping[str, Any]) -> Layout:
        """The layout with the `merge` that a model's inputs state, if they do, as those of VideoLLaMA 3 do."""
        stated = inputs.get("merge_sizes", inputs.get("image_merge_sizes"))
        if not isinstance(stated, Tensor):
            return self
        sizes = stated.unique().tolist()
        if len(sizes) > 1:
            raise ValueError(f"images whose tokens are merged by different sizes, {sizes}, are not read")
        return replace(self, merge=int(sizes[0]))

    def sizes(self, inputs: Mapping[str, Any]) -> list[Size] | None:
        """Frames, rows and columns of the images in a model's inputs; None if they are not known."""
        if self.cut:
            return [(1, self.cut, self.cut)]
        for name in ("image_grid_thw", "grid_thw"):
            if isinstance(grids := inputs.get(name), Tensor):
                return [(int(frames), int(rows), int(columns)) for frames, rows, columns in grids.tolist()]
        if isinstance(places := inputs.get("pixel_position_ids"), Tensor):
            return _whole_grid(places)
        pixels = inputs.get("pixel_values")
        if not isinstance(pixels, Tensor) or pixels.ndim != 4 or not self.patch:
            return None
        return [(1, pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch)]

    def coordinates(self, sizes: Sequence[Size]) -> Float[Tensor, "n 3"]:
        """Time, row and column of all tokens of some images."""
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


def _whole_grid(places: Int[Tensor, "images tokens 2"]) -> list[Size] | None:
    """The size of a grid whose tokens stand row by row, by their columns and rows; None if they do not."""
    columns, rows = (int(size) + 1 for size in places[0].amax(0))
    tokens = torch.arange(rows * columns, device=places.device)
    grid = torch.stack((tokens % columns, tokens // columns), -1)
    whole = places.shape[1] == len(grid) and bool((places == grid).all())
    return [(1, rows, columns)] if whole else None


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
    parts: int = 1  # see AxialRope

    def angles(self, position: float | Tensor) -> Float[Tensor, "*positions pairs"]:
        """The angles of tokens."""
        return self.table.to(position.device)[position] if isinstance(position, Tensor) else self.table[int(position)]

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.parts == 1:
            return super()._turned(x, angles)
        if x.shape[-1] != self.dims:
            raise ValueError(f"rope rotates {self.dims} dimensions, but the head has {x.shape[-1]}")
        part = replace(self, dims=self.dims // self.parts, frequencies=None, parts=1)
        both = zip(x.chunk(self.parts, -1), angles.chunk(self.parts, -1), strict=True)
        return torch.cat([part._turned(tokens, turned) for tokens, turned in both], -1)


@dataclass(frozen=True, eq=False)
class AxialRope:
    """RoPE on a grid: pair i turns by ω_i times the coordinate `axes[i]` (0 time, 1 row, 2 column) of its token.

    A score depends on the offsets of two tokens in all coordinates, and not on one offset: `on` gives the rotation for
    the tokens of a grid.
    """

    rope: Rope
    axes: Int[Tensor, " pairs"]
    layout: Layout = field(default_factory=Layout)
    before: Float[Tensor, "tokens pairs"] | None = None
    after: Float[Tensor, "others pairs"] | None = None
    parts: int = 1

    def on(self, sizes: Sequence[Size]) -> PlacedRope:
        """The rotation of the tokens of some images, of frames × rows × columns each."""
        assert self.rope.frequencies is not None
        angles = self.layout.coordinates(sizes)[:, self.axes] * self.rope.frequencies.double()
        table = torch.cat([part.double() for part in (self.before, angles, self.after) if part is not None])
        rope = self.rope
        return PlacedRope(rope.dims, rope.base, rope.interleaved, rope.frequencies, rope.factor, table, self.parts)


class Energies(NamedTuple):
    """Per offset: ‖M(Δ)‖², ‖M(−Δ)‖², tr(M(Δ)²) and ⟨M(Δ), M(−Δ)ᵀ⟩."""

    there: Float[Tensor, "offsets *batch"]
    back: Float[Tensor, "offsets *batch"]
    contents: Float[Tensor, "offsets *batch"]
    exchange: Float[Tensor, "offsets *batch"]

    def contents_symmetry(self) -> Tensor:
        """tr(M(Δ)²)/‖M(Δ)‖²: 1 if swapping two contents at the same offset leaves the score unchanged."""
        return self.contents / torch.where(self.there > 0, self.there, 1.0)

    def exchange_symmetry(self) -> Tensor:
        """The same for tokens swapped together with their positions, of ½(M(Δ) ± M(−Δ)ᵀ)."""
        both = (self.there + self.back) / 2
        return self.exchange / torch.where(both > 0, both, 1.0)


def energies(gram: Float[Tensor, "*batch n n"], rope: Rope | None, offsets: Float[Tensor, " offsets"]) -> Energies:
    """Energies at each offset; without a rope they are the same at all offsets.

    A plane of RoPE is one complex coordinate z, and a block of a matrix between two planes maps z to Pz + Nz̄. Rotations
    only change the phases of P and N, so that each trace is Re Σ coefficient·phase over pairs of planes, with
    coefficients of the head alone and phases of the offsets alone.
    """
    rank = gram.shape[-1] // 2
    gram_query, gram_key, cross = gram[..., :rank, :rank], gram[..., rank:, rank:], gram[..., rank:, :rank]
    if rope is None:
        norm, trace = ((left * right.mT).sum((-2, -1)) for left, right in ((gram_query, gram_key), (cross, cross)))
        return Energies(*(value.expand(len(offsets), *gram.shape[:-2]) for value in (norm, norm, trace, trace)))
    (p_query, n_query), (p_key, n_key), (p, n) = (_in_planes(t, rope) for t in (gram_query, gram_key, cross))
    frequencies = nn.functional.pad(rope.angles(gram.new_ones(())), (0, p.shape[-1] - rope.dims // 2))
    # The factor on cosine and sine belongs to queries as well as to keys.
    factors = torch.ones_like(frequencies)
    factors[: rope.dims // 2] = rope.factor**2
    alike, apart = frequencies[:, None] - frequencies, frequencies[:, None] + frequencies
    phases = [
        torch.polar(2 * (factors[:, None] * factors).expand(len(angle), -1, -1), angle)
        for angle in (offsets.to(gram.device, torch.float64)[:, None, None] * frequency for frequency in (alike, apart))
    ]
    norms, traces = (p_query.conj() * p_key, n_query.conj() * n_key), (p * p.mT, n * n.conj().mT)
    there, exchange = (_traced(pair, phases) for pair in (norms, traces))
    back = _traced(norms, [phase.conj() for phase in phases])
    return Energies(there, back, _traced(traces, phases[::-1]), exchange)


def _in_planes(matrix: Float[Tensor, "*batch r r"], rope: Rope) -> tuple[Tensor, Tensor]:
    """P and N of every pair of planes, (..., planes, planes), complex; dimensions that are not rotated by twos."""
    odd = matrix.shape[-1] % 2
    matrix = nn.functional.pad(matrix, (0, odd, 0, odd))
    rotated, rest = torch.arange(matrix.shape[-1], device=matrix.device).tensor_split([rope.dims])
    rotated = rotated.reshape(-1, 2) if rope.interleaved else rotated.reshape(2, -1).mT
    first, second = torch.cat((rotated, rest.reshape(-1, 2))).unbind(1)
    rows = matrix[..., first, :], matrix[..., second, :]
    (a, b), (c, d) = ((row[..., first], row[..., second]) for row in rows)
    return torch.complex((a + d) / 2, (c - b) / 2), torch.complex((a - d) / 2, (c + b) / 2)


def _traced(parts: tuple[Tensor, Tensor], phases: list[Tensor]) -> Float[Tensor, "offsets *batch"]:
    """Re Σ coefficient·phase of both parts, for every offset."""
    flat = [torch.view_as_real(part.conj().resolve_conj()).flatten(-3) for part in parts]
    turned = [torch.view_as_real(phase.resolve_conj()).flatten(1) for phase in phases]
    traces = sum(phase @ part.reshape(-1, part.shape[-1]).mT for part, phase in zip(flat, turned, strict=True))
    return torch.as_tensor(traces).reshape(-1, *parts[0].shape[:-2])


def fitted_ropes(
    plain: Float[Tensor, "tokens heads r"],
    target: Float[Tensor, "tokens heads r"],
    positions: Int[Tensor, " tokens"],
    tolerance: float,
) -> list[Rope]:
    """Rotations of pairs of dimensions that may lie between two versions of queries: angles grow with the position."""
    rank, last = plain.shape[-1], int(positions.max())
    moved = ((plain - target).abs().amax((0, 1)) > tolerance * target.abs().max()).nonzero()
    if not len(moved) or last < 1:
        return []
    width = int(moved.max()) + 1
    sizes = {size for size in (rank, rank // 2, rank // 4, width + width % 2) if width <= size and not size % 2}
    ropes = []
    for dims in sorted(sizes):
        for interleaved in (False, True):
            before, after = (_complex_pairs(x[..., :dims], interleaved) for x in (plain, target))

            def turn(position: int, before: Tensor = before, after: Tensor = after) -> Tensor:
                rows = positions == position
                ratio = (before[rows].conj() * after[rows]).sum((0, 1))
                return ratio / before[rows].abs().square().sum((0, 1)).clamp(min=1e-30)

            angle, position = turn(1).angle(), 1
            while position < last:  # a longer way gives the same angle more precisely
                position = min(2 * position, last)
                wrapped = turn(position).angle()
                angle = (wrapped + 2 * math.pi * ((angle * position - wrapped) / (2 * math.pi)).round()) / position
            ropes.append(Rope(dims, interleaved=interleaved, frequencies=angle.cpu()))
    return ropes


def _complex_pairs(x: Tensor, interleaved: bool) -> Tensor:
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.complex(first, second)
