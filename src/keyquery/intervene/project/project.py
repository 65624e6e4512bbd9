"""`project`: replace the QK form of one head by its symmetric, skew, PSD or low-rank part in a running model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from keyquery.forms import Form, Rope
from keyquery.intervene.handle import Handle, check_model, lasting
from keyquery.intervene.project.rotary_planes import fill, inverse, pairs, plane_rows
from keyquery.intervene.rewrites import rewrite, sites_of
from keyquery.intervene.selection import select
from keyquery.intervene.sites import Context, Rewrite, Site, labels_of
from keyquery.listening.exclusive import Changes
from keyquery.support.checks import check_choice, check_count

KERNELS = ("general", "symmetric", "psd", "skew", "split", "zero")


class Maps(NamedTuple):
    """q̃ = query·[q; k] and k̃ = key·[q; k] of a head, and the share of ‖M‖² that is lost."""

    query: Float[Tensor, "w n"]
    key: Float[Tensor, "w n"]
    lost: float


class Linear(Rewrite):
    """A rewrite of one head by two linear maps of its [q; k]; position biases, which are no part of the form, stay."""

    def __init__(self, head: int, maps: Maps) -> None:
        self.heads, self.maps = [head], maps

    def __call__(self, context: Context) -> tuple[Float[Tensor, "batch 1 n w"], Float[Tensor, "batch 1 m w"]]:
        """The head's new queries and keys."""
        both = torch.cat((context.queries[:, self.heads], context.keys[:, self.heads]), -1)
        query, key = (matrix.to(both) for matrix in self.maps[:2])
        return both[..., -context.new :, :] @ query.mT, both @ key.mT


class Projection(Handle):
    """A projected head; `lost` is the lost share of ‖M‖²."""

    def __init__(self, changes: Changes, what: str, lost: float) -> None:
        super().__init__(changes, what)
        self.lost = lost


def project(
    model: nn.Module,
    head: str | tuple[int, int],
    kernel: str = "symmetric",
    rank: int | None = None,
) -> Projection:
    """Replace the QK form of one head while the model runs.

    "symmetric" is ½(s_ij + s_ji) and "skew" ½(s_ij − s_ji), exactly, by vectors of twice the width; "psd" is the
    positive part of the symmetric one, "split" the largest of symmetric and skew dimensions, as many as the head has,
    "zero" removes the score, "general" keeps the form, at a lower rank.

    Parameters
    ----------
    model
        A live model in eval mode.
    head
        A pair (layer, head), or a string such as "0.1".
    kernel
        "general", "symmetric", "psd", "skew" or "zero". Default: "symmetric".
    rank
        Keep only this many dimensions, by their share of ‖M‖². Under RoPE dimensions are kept in pairs. Default: all.

    Returns
    -------
    Projection
        A context manager, or a handle with `.undo()`; `.lost` is the lost share of ‖M‖². Position biases stay.

    Raises
    ------
    ValueError
        If `head` does not select exactly one head, its layer is MLA, or `rank` does not fit the kernel.

    Examples
    --------
    >>> layer, x = kq.Attention(16, heads=2), torch.randn(1, 5, 16)
    >>> with kq.project(layer, head=(0, 1), kernel="general", rank=2) as projection:
    ...     _ = layer(x)
    >>> 0 < projection.lost < 1
    True

    See Also
    --------
    dial : Scale parts of the scores.
    swap : Replace whole attention layers.
    """
    model = check_model(model)
    check_choice("kernel", kernel, KERNELS)
    sites = sites_of(model)
    known = {index: range(site.count) for index, site in sites.items()}
    chosen = [(i, h) for i, numbers in select([head], known, labels_of(sites)).items() for h in numbers]
    if len(chosen) != 1:
        raise ValueError(f"head must select one head, got {head!r}, which selects {len(chosen)}")
    index, number = chosen[0]
    new = linear(sites[index], number, kernel, rank)

    def change(changes: Changes) -> Projection:
        rewrite(model, sites, [(index, new)], changes)
        return Projection(changes, f"projection of head {index}.{number}", new.maps.lost)

    return lasting(model, change)


def linear(site: Site, head: int, kernel: str, rank: int | None) -> Linear:
    """The rewrite of a head to its nearest form of a kernel."""
    form = site.read().gained().form()
    gram = form.gram().flatten(0, len(form.batch) - 1)[head].cpu()  # of [Q; K]
    return Linear(head, _maps(site, kernel, rank, gram))


def _maps(site: Site, kernel: str, rank: int | None, gram: Float[Tensor, "n n"]) -> Maps:
    rope, dims = site.turn.rope, gram.shape[-1] // 2
    check_count("rank", rank, 1, 2 * dims, optional=True)
    if site.turn.start:
        raise ValueError(f"{site.name} is an MLA layer, whose heads have two QK forms: they cannot be projected")
    if rank is None and kernel == "general":
        raise ValueError('kernel "general" needs a rank')
    if rank is not None and rank % 2 and (rope is not None or kernel in ("skew", "split")):
        raise ValueError(f"rank must be even here, since dimensions come in rotation pairs, got {rank}")
    blank = torch.zeros(1, 2 * dims, dtype=torch.float64)  # also if a head has no such part
    if kernel == "zero":
        return Maps(blank, blank, 1.0)
    kept: list[Component] = []
    if kernel == "split":
        rank = rank or dims
        parts = components("symmetric", gram, rope) + components("skew", gram, rope)
    else:
        parts = components(kernel, gram, rope)
    for component in sorted(parts, key=lambda part: -part.share):
        if rank is None or sum(len(earlier.query) for earlier in kept) + len(component.query) <= rank:
            kept.append(component)
    lost = 1 - sum(component.share for component in kept)
    if rank is None and kernel in ("symmetric", "skew"):  # exact, without the rounding of components
        query, key = torch.eye(2 * dims, dtype=torch.float64).split(dims)
        sign = 1 if kernel == "symmetric" else -1
        return Maps(torch.cat((query, sign * key)) / 2, torch.cat((key, query)), lost)
    query, key = (torch.cat([blank, *(getattr(component, side) for component in kept)]) for side in ("query", "key"))
    return Maps(query, key, lost)


class Component(NamedTuple):
    """(query·u)·(key·u′) with u = [q; k]: one dimension, or a rotary plane's two; its share of ‖M‖²."""

    share: float
    query: Float[Tensor, "d n"]
    key: Float[Tensor, "d n"]


def components(kernel: str, gram: Float[Tensor, "n n"], rope: Rope | None = None) -> list[Component]:
    """The components of a head M, or of its "symmetric", "psd" or "skew" part, by falling share of ‖M‖².

    `gram` is that of [Q; K], or the covariance of [q; k]. Without RoPE they are the singular vectors. A rotary plane is
    a complex number, M_p = conj(q_p)·k_p, and planes do not interact: their singular vectors have two dimensions each,
    and shares are averages over all rotations.
    """
    rank, gram = gram.shape[-1] // 2, gram.detach().double()
    rotated = 0 if rope is None else rope.dims
    rest = torch.arange(rotated, rank)
    parts, total = [], 0.0
    if len(rest):
        both = torch.cat((rest, rest + rank))
        form = Form.from_gram(gram[both[:, None], both])
        matrix = form.query.mT @ form.key
        total += float(matrix.square().sum())
        left, sizes, right = _svd(matrix, kernel, torch.cat((form.query, form.key)))
        for size, query, key in zip(sizes.tolist(), left, right, strict=True):
            rows = torch.zeros(2, 1, 2 * rank, dtype=gram.dtype)
            rows[0, 0, both], rows[1, 0, both] = query, key
            parts.append((size**2, *rows))
    if rope is not None:
        first, second = pairs(rope, gram.device)
        mean = rope.factor**4 / 2  # mean over rotations of (Re e^{iθ}w)²/|w|²
        for a, b, rows in zip(first, second, plane_rows(gram, first, second), strict=True):
            matrix = rows[:1].mH @ rows[1:]
            total += mean * float(matrix.abs().square().sum())
            left, sizes, right = _svd(matrix, kernel, rows)
            for size, query, key in zip(sizes.tolist(), left, right, strict=True):
                parts.append((mean * size**2, _real(query, a, b, rank), _real(key, a, b, rank)))
    parts.sort(key=lambda part: -part[0])
    least = torch.finfo(gram.dtype).eps * rank * total
    return [Component(energy / total, query, key) for energy, query, key in parts if energy > least]


def _svd(matrix: Tensor, kernel: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors of a part of a matrix, each with the root of its size, as rows on u where rows·w = u."""
    match kernel:
        case "symmetric":
            matrix = (matrix + matrix.mH) / 2
        case "skew":
            matrix = (matrix - matrix.mH) / 2
        case "psd":
            values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
            matrix = vectors * values.clamp(min=0) @ vectors.mH
    left, sizes, right = torch.linalg.svd(matrix)
    roots, back = sizes.sqrt()[:, None], inverse(rows)
    return roots * left.mH @ back, sizes, roots * right @ back


def _real(row: Shaped[Tensor, "2"], a: Tensor, b: Tensor, rank: int) -> Float[Tensor, "2 n"]:
    """Complex coefficients of (q_p, k_p) as two rows on [q; k]."""
    out = torch.zeros(2, 2 * rank, dtype=torch.float64)
    first, second = torch.tensor([0]), torch.tensor([1])
    for side, number in enumerate(row):
        fill(out, first, second, a[None] + side * rank, b[None] + side * rank, number[None])
    return out
