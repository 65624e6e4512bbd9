"""The parts of a running model's scores, each as a matrix."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms.parts import Rotated
from keyquery.intervene.dial.means import SiteMeans
from keyquery.intervene.sites import Context


def parts_of(
    context: Context, means: SiteMeans | None, heads: slice, dtype: torch.dtype
) -> Float[Tensor, "5 batch some n m"]:
    """The parts of query·key of some heads, in the order of `forms.parts.PARTS`, without biases.

    `means` are of data, or (None) of this batch.
    """
    queries, keys = (x[:, heads].to(dtype) for x in (context.queries, context.keys))
    batch = SiteMeans(*(mean[None] for mean in context.means())) if means is None else means
    query_mean, key_mean = (mean[:, heads].to(dtype) for mean in batch.at(context))
    contents = queries - query_mean, keys - key_mean
    places = context.turned.unsqueeze(1)
    back = [context.turn.rotate(context.turn.back(x, places), -places) for x in contents]
    at = Rotated(*contents, query_mean.expand_as(queries), key_mean.expand_as(keys), *back)
    pairs, swapped = at.query @ at.key.mT, at.swapped()
    parts = torch.stack(
        (
            (pairs + swapped) / 2,
            (pairs - swapped) / 2,
            at.query_mean @ at.key.mT,
            at.query @ at.key_mean.mT,
            (at.query_mean @ at.key_mean.mT).expand_as(pairs),
        )
    )
    return parts[..., -context.new :, :]
