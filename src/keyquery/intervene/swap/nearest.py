"""The structured kernel nearest to a trained head: z = B·[q; k], from the Gram matrix of [q; k] alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from keyquery.forms import Form, Rope
from keyquery.intervene.project.rotary_planes import fill, inverse, pairs, plane_rows


class Nearest(NamedTuple):
    """z = mix·[q; k] for every head, or for some of its dimensions, and the initial kernel parameters.

    `core` is the gain D of a symmetric or split kernel, the matrix P of a pairwise one, None for the others. ‖M − M̂‖²
    is `error`, ‖M‖² is `energy`.
    """

    mix: Float[Tensor, "*batch r n"]
    core: Tensor | None
    error: Float[Tensor, "*batch"]
    energy: Float[Tensor, "*batch"]

    @property
    def lost(self) -> Float[Tensor, "*batch"]:
        """The lost share of ‖M‖²."""
        return self.error / torch.where(self.energy > 0, self.energy, 1.0)


def nearest(
    kernel: str, gram: Float[Tensor, "*batch n n"], rope: Rope | None = None, symmetric_dims: int = 0
) -> Nearest:
    """The structured kernel M̂ that minimises ‖M − M̂‖ for heads M = QᵀK, from the Gram matrix of [Q; K].

    `gram` (..., 2r, 2r) is [Q; K][Q; K]ᵀ of the weights or, for the norm on data, the covariance of [q; k]. For a
    pairwise kernel no closed form is known: M is compressed to its r leading directions. For an rbf kernel only the
    metric is fitted: the norm of the key that it subtracts is not part of the QK form.

    With `rope` the norm is averaged over all rotations: every rotary plane is a complex number, M_p = conj(q_p)·k_p,
    and planes do not interact. Of each plane's structured part, z_p keeps one of two eigenvectors.
    """
    rank, gram = gram.shape[-1] // 2, gram.detach().double()
    if rope is None:
        return _unrotated(kernel, gram, symmetric_dims)
    turned = _rotated(kernel, gram, rope, symmetric_dims)
    if rope.dims == rank:
        return turned
    rest = torch.arange(rope.dims, rank, device=gram.device)
    both = torch.cat((rest, rest + rank))
    still = _unrotated(kernel, gram[..., both[:, None], both], 0)
    mix = turned.mix.clone()
    mix[..., rest[:, None], both] = still.mix
    core = _joined(kernel, turned.core, still.core, rope.dims)
    return Nearest(mix, core, turned.error + still.error, turned.energy + still.energy)


def _unrotated(kernel: str, gram: Tensor, symmetric: int) -> Nearest:
    """Dimensions without RoPE, in coordinates u where [q; k] = R·u and ‖M‖ is the Frobenius norm."""
    form = Form.from_gram(gram)
    rank = form.rank
    core: Tensor | None
    match kernel:
        case "psd" | "rbf":
            values, vectors = form.eigh()
            rows, core = _rows(values[..., :rank].clamp(min=0), vectors[..., :rank]), None
            inner = torch.eye(rank, dtype=gram.dtype, device=gram.device)
        case "pairwise":
            rows, inner = _compressed(form)
            core = inner
        case _:
            symmetric = {"symmetric": rank, "skew": 0}.get(kernel, symmetric)
            rows, gain, inner = _split(form, symmetric)
            core = None if kernel == "skew" else gain
    whole = form.query.mT @ form.key
    error = (whole - rows.mT @ inner @ rows).square().sum((-2, -1))
    return Nearest(rows @ inverse(torch.cat((form.query, form.key), -2)), core, error, whole.square().sum((-2, -1)))


def _split(form: Form, symmetric: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading eigenvectors of S, then source and target of the leading planes of A: rows, D, and C of zᵀCz."""
    rank, planes = form.rank, (form.rank - symmetric) // 2
    values, vectors = form.eigh(max(symmetric, 1))
    values, vectors = values[..., :symmetric], vectors[..., :symmetric]
    sizes, source, target = form.skew_planes(max(planes, 1))
    sizes, source, target = sizes[..., :planes], source[..., :planes], target[..., :planes]
    rows = torch.cat((_rows(values.abs(), vectors), _rows(sizes, source), _rows(sizes, target)), -2)
    gain = torch.where(values < 0, -1.0, 1.0).to(values.dtype)
    inner = rows.new_zeros(*rows.shape[:-2], rank, rank)
    inner[..., :symmetric, :symmetric] = torch.diag_embed(gain)
    first = torch.arange(symmetric, symmetric + planes, device=rows.device)
    inner[..., first, first + planes], inner[..., first + planes, first] = 1.0, -1.0
    return rows, gain, inner


def _compressed(form: Form) -> tuple[Tensor, Tensor]:
    """Orthonormal rows that span the leading eigenvectors of MMᵀ + MᵀM, and M between them."""
    whole = form.query.mT @ form.key
    rows = torch.linalg.eigh(whole @ whole.mT + whole.mT @ whole).eigenvectors[..., -form.rank :].mT
    return rows, rows @ whole @ rows.mT


def _rotated(kernel: str, gram: Tensor, rope: Rope, symmetric: int) -> Nearest:
    """Rotary planes: M_p is complex of rank one, and the Hermitian part of e^{iφ}·M_p gives z_p, φ by the kernel."""
    rank = gram.shape[-1] // 2
    first, second = pairs(rope, gram.device)
    rows = plane_rows(gram, first, second)
    whole = rows[..., :1, :].mH @ rows[..., 1:, :]
    phase = _phase(kernel, whole.diagonal(dim1=-2, dim2=-1).sum(-1), symmetric)
    tilted = phase[..., None, None] * whole
    sizes, directions = torch.linalg.eigh((tilted + tilted.mH) / 2)
    z = directions[..., 1:].mH * sizes[..., 1, None, None].clamp(min=0).sqrt()
    near = phase.conj()[..., None, None] * (z.mH @ z)
    weights = z @ inverse(rows)
    mix = gram.new_zeros(*gram.shape[:-2], rank, 2 * rank)
    fill(mix, first, second, first, second, weights[..., 0, 0])
    fill(mix, first, second, first + rank, second + rank, weights[..., 0, 1])
    # A rotation by every angle: the mean of (Re e^{iθ}w)² is |w|²/2.
    size = rope.factor**4 / 2
    error, energy = (size * t.abs().square().sum((-3, -2, -1)) for t in (whole - near, whole))
    return Nearest(mix, _plane_core(kernel, phase, first, second, symmetric, rope.dims), error, energy)


def _phase(kernel: str, trace: Complex[Tensor, "*batch pairs"], symmetric: int) -> Complex[Tensor, "*batch pairs"]:
    """e^{iφ}: the kernel of a plane is e^{−iφ}·conj(z)·z', with ±1 for symmetric planes and i for skew ones."""
    sign = torch.where(trace.real < 0, -1.0, 1.0).to(trace.dtype)
    match kernel:
        case "symmetric":
            return sign
        case "skew":
            return torch.full_like(trace, 1j)
        case "split":  # the first symmetric/2 planes
            return torch.where(torch.arange(trace.shape[-1], device=trace.device) < symmetric // 2, sign, 1j)
        case "pairwise":
            return torch.where(trace == 0, 1.0, trace.conj() / trace.abs().clamp(min=1e-300))
    return torch.ones_like(trace)


def _plane_core(kernel: str, phase: Tensor, first: Tensor, second: Tensor, symmetric: int, dims: int) -> Tensor | None:
    match kernel:
        case "symmetric":
            return phase.real
        case "split":
            return phase.real[..., : symmetric // 2]
        case "pairwise":
            matrix = phase.real.new_zeros(*phase.shape[:-1], dims, dims)
            fill(matrix, first, second, first, second, phase.conj())
            return matrix
    return None


def _joined(kernel: str, rotated: Tensor | None, unrotated: Tensor | None, dims: int) -> Tensor | None:
    """The core of a head that is rotated in part."""
    if rotated is None or unrotated is None:
        return None
    if kernel != "pairwise":
        return torch.cat((rotated, unrotated), -1)
    rank = dims + unrotated.shape[-1]
    matrix = unrotated.new_zeros(*unrotated.shape[:-2], rank, rank)
    matrix[..., :dims, :dims], matrix[..., dims:, dims:] = rotated, unrotated
    return matrix


def _rows(values: Tensor, vectors: Tensor) -> Tensor:
    """√λ·vᵀ."""
    return vectors.mT * values.sqrt().unsqueeze(-1)
