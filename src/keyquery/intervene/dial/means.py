"""Mean queries and keys that separate the parts of scores in a running model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.forms.parts import Rotated
from keyquery.intervene.rewrites import check_unchanged, sites_of
from keyquery.intervene.sites import Context, Site
from keyquery.listening import Batch, batches_of, joint_moments
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.on_data import SEQUENCES, position_means, rows_of
from keyquery.support.checks import check_choice

MEANS = ("position", "global")


class SiteMeans:
    """Mean query and key of one site before RoPE: one per position, or (`places` 1) one for all."""

    def __init__(self, query: Float[Tensor, "places heads r"], key: Float[Tensor, "places heads r"]) -> None:
        self.query, self.key = query, key
        self.by_position = len(query) > 1

    def overall(self) -> SiteMeans:
        """Their mean over all positions."""
        return SiteMeans(self.query.mean(0, keepdim=True), self.key.mean(0, keepdim=True))

    def at(self, context: Context) -> tuple[Float[Tensor, "#batch heads m r"], Float[Tensor, "#batch heads m r"]]:
        """Both means at the position of every token, rotated as it is."""
        if self.query.shape[-1] != context.keys.shape[-1]:
            raise ValueError("an rbf kernel uses the means of the current batch: omit data")
        rows = torch.zeros_like(context.positions).long()
        if self.by_position:
            rows, last = context.positions.long().clamp(min=0), len(self.query) - 1
            if int(rows.max()) > last:
                warnings.warn(
                    f"means were measured at positions 0 to {last}; later positions use those of position {last}",
                    stacklevel=2,
                )
            rows = rows.clamp(max=last)
        rows = rows.to(context.keys.device)
        means = (mean.to(context.keys)[rows].transpose(1, 2) for mean in (self.query, self.key))
        query, key = (context.turn.rotate(mean, context.turned.unsqueeze(1)) for mean in means)
        return query, key


class Means:
    """Mean queries and keys of every layer over data, reusable for several dials of one model.

    `kind` is "position" (one mean per position) or "global" (one for all). Default: "position"; "global", with a
    warning, if data has fewer than 32 sequences.
    """

    def __init__(self, model: nn.Module, data: Iterable[Batch], kind: str | None = None) -> None:
        if kind is not None:
            check_choice("means", kind, MEANS)
        check_unchanged(model)
        batches = list(batches_of(data))
        count = sum(map(rows_of, batches))
        if kind is None and batches and count < SEQUENCES:
            warnings.warn(
                f"data has {count} sequences, and means by position need {SEQUENCES}: means are over all positions, "
                'and learned positions count as popularity; pass means="global" or "position" to choose',
                stacklevel=3,
            )
            kind = "global"
        self.kind = kind or "position"
        self._model, self._batches = model, batches
        self._covariances: dict[int, Tensor] = {}
        self._layers = next(iter(sites_of(model).values())).found
        self._of = position_means(model, batches, self._layers)

    def of(self, site: Site) -> SiteMeans:
        """Mean query and key of a site before RoPE."""
        query, key = self._read(site.index)
        if not site.turn.start:
            return SiteMeans(query, key)
        # MLA: nope and rope concatenated, and pairs permuted as in the module.
        if site.sorted:
            query, key = (torch.cat((t[..., 0::2], t[..., 1::2]), -1) for t in (query, key))
        still = self._read(site.index - 1)
        return SiteMeans(torch.cat((still[0], query), -1), torch.cat((still[1], key), -1))

    def covariance(self, site: Site) -> Float[Tensor, "heads n n"]:
        """Covariance of [q; k] of each head about these means, before RoPE; the model runs once for all layers."""
        if not self._covariances:
            moments = joint_moments(self._model, self._batches, self._layers)
            self._covariances = {index: of_layer.covariance.cpu() for index, of_layer in moments.items()}
        whole = self._covariances[site.index]
        if self.kind == "global":
            return whole
        means, counts = torch.cat(self._read(site.index), -1).cpu(), self._of[site.index].counts.sum(0).cpu()
        weights = counts / counts.sum()
        away = means - (weights[:, None, None] * means).sum(0)  # (positions, heads, 2r)
        within = whole - torch.einsum("p,phm,phn->hmn", weights, away, away)
        largest, total = (t.diagonal(dim1=-2, dim2=-1).amax(-1) for t in (within, whole))
        if bool((largest <= 1e-6 * total).any()):
            raise ValueError("data has no variance about its means by position: pass more, and different, sequences")
        return (within + within.mT) / 2

    def _read(self, index: int) -> tuple[Float[Tensor, "positions heads r"], Float[Tensor, "positions heads r"]]:
        of_layer: PositionMeans = self._of[index]
        if self.kind == "global":
            query, key = (mean[None] for mean in of_layer.everywhere())
        else:
            positions = torch.arange(of_layer.counts.shape[1])
            query, key = (mean[0].transpose(0, 1) for mean in of_layer.at(positions[None]))
        return query / self._layers[index].scale, key


def parts_of(
    context: Context, means: SiteMeans | None, heads: slice, dtype: torch.dtype
) -> Float[Tensor, "5 batch some n m"]:
    """The parts of query·key of some heads, in the order of `forms.parts.PARTS`, without biases.

    `means` are of data, or (None) of this batch.
    """
    queries, keys = (x[:, heads].to(dtype) for x in (context.queries, context.keys))
    measured = SiteMeans(*(mean[None] for mean in context.means())) if means is None else means
    query_mean, key_mean = (mean[:, heads].to(dtype).expand_as(queries) for mean in measured.at(context))
    contents = queries - query_mean, keys - key_mean
    positions = context.turned.unsqueeze(1)
    back = [context.turn.rotate(context.turn.back(x, positions), -positions) for x in contents]
    return torch.stack(Rotated(*contents, query_mean, key_mean, *back).parts())[..., -context.new :, :]
