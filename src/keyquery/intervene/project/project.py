"""`project`: replace the QK form of one head by its symmetric, skew, PSD or low-rank part in a running model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.intervene.handle import Handle, check_model, lasting
from keyquery.intervene.project.components import Component, components
from keyquery.intervene.rewrites import rewrite, sites_of
from keyquery.intervene.selection import select
from keyquery.intervene.sites import Context, Site, labels_of
from keyquery.listening.exclusive import Changes
from keyquery.support.checks import check_choice, check_count

KERNELS = ("general", "symmetric", "psd", "skew", "split", "zero")


class Maps(NamedTuple):
    """q̃ = query·[q; k] and k̃ = key·[q; k] of a head, and the share of ‖M‖² that is lost."""

    query: Float[Tensor, "w n"]
    key: Float[Tensor, "w n"]
    lost: float


class Linear:
    """A rewrite of one head by two linear maps of its [q; k]."""

    def __init__(self, head: int, maps: Maps) -> None:
        self.heads, self.maps = [head], maps

    def __call__(self, context: Context) -> tuple[Float[Tensor, "batch 1 n w"], Float[Tensor, "batch 1 m w"]]:
        """The head's new queries and keys."""
        both = torch.cat((context.queries[:, self.heads], context.keys[:, self.heads]), -1)
        query, key = (matrix.to(both) for matrix in self.maps[:2])
        return both[..., -context.new :, :] @ query.mT, both @ key.mT

    def bias_gain(self) -> None:
        """A position bias is not part of the QK form, and stays."""


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
        If `head` does not select exactly one head, or `rank` does not fit the kernel.

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
        rewrite(model, sites, {index: new}, changes)
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
    if site.turn.start and (rank is not None or kernel in ("psd", "split")):
        raise ValueError(f"{site.name} is an MLA head: only symmetric, skew and zero, without a rank, are supported")
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
