"""One head made symmetric, skew, PSD, of a given rank, or zero, in a running model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture import Batch, batches_of, joint_moments
from keyquery.support.checks import check_choice, check_count
from keyquery.surgery.handle import Handle, check_model, lasting
from keyquery.surgery.project.components import Component, components
from keyquery.surgery.rewriting.attach import check_unchanged, rewrite, sites_of
from keyquery.surgery.rewriting.sites import Call, Site, labels_of
from keyquery.surgery.selection import select

KERNELS = ("general", "symmetric", "psd", "skew", "zero")


class Maps(NamedTuple):
    """q̃ = query·[q; k] and k̃ = key·[q; k] of a head, and the share of ‖M‖² that they leave out."""

    query: Float[Tensor, "w n"]
    key: Float[Tensor, "w n"]
    lost: float


class Linear:
    """A rewrite of one head by two linear maps of its [q; k]."""

    def __init__(self, head: int, maps: Maps) -> None:
        self.heads, self._maps = [head], maps

    def __call__(self, call: Call) -> tuple[Float[Tensor, "batch 1 n w"], Float[Tensor, "batch 1 m w"]]:
        """The head's new queries and keys."""
        both = torch.cat((call.queries[:, self.heads], call.keys[:, self.heads]), -1)
        query, key = (matrix.to(both) for matrix in self._maps[:2])
        return both[..., -call.new :, :] @ query.mT, both @ key.mT

    def bias_gain(self) -> Float[Tensor, " heads"]:
        """A bias by position is no part of the form: it stays."""
        return torch.ones(1, dtype=torch.float64)


class Projection(Handle):
    """A projected head; `lost` is the share of ‖M‖² that is gone, of its weights or, with data, on data."""

    def __init__(self, changes: ExitStack, what: str, lost: float) -> None:
        super().__init__(changes, what)
        self.lost = lost


def project(
    model: nn.Module,
    head: str | tuple[int, int],
    kernel: str = "symmetric",
    rank: int | None = None,
    *,
    data: Iterable[Batch] | None = None,
) -> Projection:
    """Give one head (layer, number) another kernel while the model runs; a context, or a handle with `.undo()`.

    "symmetric" is ½(s_ij + s_ji) and "skew" ½(s_ij − s_ji), exactly, by vectors of twice the width; "psd" is the
    positive part of the symmetric one, "zero" no score at all. `rank` keeps that many dimensions, those that carry
    most ("general" keeps the form itself otherwise); what carries most is a matter of the weights, or of `data`.
    Biases by position stay. Under rotary positions all this holds for tokens that change places with their positions,
    and dimensions are kept in pairs.

    >>> layer, x = kq.Attention(16, heads=2), torch.randn(1, 5, 16)
    >>> with kq.project(layer, head=(0, 1), kernel="general", rank=2) as projection:
    ...     _ = layer(x)
    >>> 0 < projection.lost < 1
    True
    """
    model = check_model(model)
    check_choice("kernel", kernel, KERNELS)
    sites = sites_of(model)
    known = {index: range(site.count) for index, site in sites.items()}
    chosen = [(i, h) for i, some in select([head], known, labels_of(sites)).items() for h in some]
    if len(chosen) != 1:
        raise ValueError(f"head must name one head, got {head!r}, which names {len(chosen)}")
    index, number = chosen[0]
    site = sites[index]
    maps = _maps(site, kernel, rank, _gram(model, site, number, data))

    def change(changes: ExitStack) -> Projection:
        rewrite(model, sites, {index: Linear(number, maps)}, changes)
        return Projection(changes, f"the projection of head {index}.{number}", maps.lost)

    return lasting(model, change)


def _gram(model: nn.Module, site: Site, head: int, data: Iterable[Batch] | None) -> Float[Tensor, "n n"]:
    """What [q; k] of a head are like: the Gram matrix of their weights, or their covariance on data."""
    if data is not None:
        check_unchanged(model)
        return joint_moments(model, batches_of(data), site.found)[site.index].covariance[head].cpu()
    form = site.read().gained().form()
    return form.gram().flatten(0, len(form.batch) - 1)[head].cpu()


def _maps(site: Site, kernel: str, rank: int | None, gram: Float[Tensor, "n n"]) -> Maps:
    rope, dims = site.turn.rope, gram.shape[-1] // 2
    check_count("rank", rank, 1, 2 * dims, optional=True)
    if site.turn.start and (rank is not None or kernel == "psd"):
        raise ValueError(
            f"{site.name} is a latent head: only symmetric, skew and zero, without a rank, are exact there"
        )
    if rank is None and kernel == "general":
        raise ValueError('kernel "general" changes nothing: give a rank')
    if rank is not None and rank % 2 and (rope is not None or kernel == "skew"):
        raise ValueError(f"rank must be even here, since dimensions turn in pairs, got {rank}")
    blank = torch.zeros(1, 2 * dims, dtype=torch.float64)  # also where a head has no such part at all
    if kernel == "zero":
        return Maps(blank, blank, 1.0)
    kept: list[Component] = []
    for one in components(kernel, gram, rope):
        if rank is None or sum(len(other.query) for other in kept) + len(one.query) <= rank:
            kept.append(one)
    lost = 1 - sum(one.share for one in kept)
    if rank is None and kernel in ("symmetric", "skew"):  # the same without the rounding of components
        query, key = torch.eye(2 * dims, dtype=torch.float64).split(dims)
        sign = 1 if kernel == "symmetric" else -1
        return Maps(torch.cat((query, sign * key)) / 2, torch.cat((key, query)), lost)
    query, key = (torch.cat([blank, *(getattr(one, side) for one in kept)]) for side in ("query", "key"))
    return Maps(query, key, lost)
