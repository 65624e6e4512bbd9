"""`dial`: scale parts of attention scores in a running model, without changing its weights.

With the mean query q̄ᵢ and the mean key k̄ⱼ at each position, and contents q′ = q − q̄ and k′ = k − k̄, all rotated as in
the model, the score of query i and key j is exactly the sum of the parts of `forms.parts`. With gains on them

    symmetric α      skew β      popularity γ      query_only ε      position δ

it is still one product, q̃·k̃, of vectors up to three times as wide (x̂ is x rotated by the negative angle):

    q̃ = [½(α+β)q′ + γq̄ , ½(α−β)k̂′ , εq′ + δq̄]      k̃ = [k′ , q̂′ , k̄]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture import Batch, batches_of
from keyquery.capture.scores.on_data import SEQUENCES, position_means, rows_of
from keyquery.capture.scores.position_means import PositionMeans
from keyquery.checkpoints.positions.relative import TABLES, VECTORS
from keyquery.forms.parts import PARTS
from keyquery.support.checks import check_choice, check_number
from keyquery.surgery.dial.widen import widen
from keyquery.surgery.handle import Handle, check_model, lasting
from keyquery.surgery.rewriting.attach import check_unchanged, rewrite, sites_of
from keyquery.surgery.rewriting.sites import Call, Site, labels_of
from keyquery.surgery.selection import Selection, select

MOST = 1e4  # larger gains overflow in half precision
POSITION = PARTS.index("position")
MEANS = ("position", "global")


class SiteMeans:
    """Mean query and key of one site before RoPE: one per position, or (`places` 1) one for all."""

    def __init__(self, query: Float[Tensor, "places heads r"], key: Float[Tensor, "places heads r"]) -> None:
        self.query, self.key = query, key
        self.by_position = len(query) > 1
        self._warned = False

    def at(
        self, call: Call, sign: int = 1
    ) -> tuple[Float[Tensor, "#batch heads m r"], Float[Tensor, "#batch heads m r"]]:
        """Both means at the position of every token, rotated to it; by the negative angle for `sign` −1."""
        if self.query.shape[-1] != call.keys.shape[-1]:
            raise ValueError("an rbf kernel uses the means of the current batch: omit data")
        places = call.places.long().clamp(min=0) if self.by_position else torch.zeros_like(call.places).long()
        last = len(self.query) - 1
        if self.by_position and not self._warned and int(places.max()) > last:
            warnings.warn(
                f"means were measured at positions 0 to {last}; later positions use those of position {last}",
                stacklevel=2,
            )
            self._warned = True
        at = places.clamp(max=last)
        means = (mean.to(call.keys)[at.to(call.keys.device)].transpose(1, 2) for mean in (self.query, self.key))
        query, key = (call.turn.rotate(mean, sign * call.places.unsqueeze(1)) for mean in means)
        return query, key


class Gains:
    """A rewrite of some heads of a layer by gains on the five parts, (5, heads)."""

    def __init__(self, heads: Sequence[int], gains: Tensor, means: SiteMeans | None) -> None:
        self.heads, self._means = list(heads), means
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by sign: places, and the means rotated to them
        self.set(gains)

    def set(self, gains: Float[Tensor, "5 heads"]) -> None:
        """Set new gains."""
        self.gains = self._near = gains
        self._idle, self._across = bool((gains == 1).all()), not torch.equal(gains[0], gains[1])

    def __call__(self, call: Call) -> tuple[Float[Tensor, "batch heads n w"], Float[Tensor, "batch heads m w"]]:
        """q̃ of the new tokens and k̃ of all."""
        queries, keys = self._own(call.queries), self._own(call.keys)
        if self._idle:  # unchanged heads keep their original path
            return queries[..., -call.new :, :], keys
        self._near = self._near.to(keys.device)  # moved once
        by_position = self._means is not None and self._means.by_position
        # Otherwise constant per query, and softmax is invariant to it.
        placed = call.turn.rope is not None or call.constants or by_position
        at_query, at_key = self._at(call)
        swapped = self._swapped(call, queries, keys) if self._across and call.turn.rope is not None else None
        return widen(queries, keys, at_query, at_key, self._near, call.new, self._across, placed, swapped)

    def _swapped(self, call: Call, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Contents q̂′ and k̂′, rotated by the negative angle."""
        at_query, at_key = self._at(call, -1)
        places = call.places.unsqueeze(1)
        query, key = (call.turn.rotate(call.turn.back(x, places), -places) for x in (queries, keys))
        return query - at_query, key - at_key

    def _at(self, call: Call, sign: int = 1) -> tuple[Tensor, Tensor]:
        """Means of its heads at every position; cached while positions stay the same."""
        if self._means is None:
            means = SiteMeans(*(mean[None] for mean in call.means()))
            query, key = (self._own(mean) for mean in means.at(call, sign))
            return query, key
        kept = self._kept.get(sign)
        if kept is None or kept[0] is not call.places or kept[1].dtype != call.keys.dtype:
            query, key = (self._own(mean) for mean in self._means.at(call, sign))
            kept = self._kept[sign] = call.places, query, key
        return kept[1:]

    def _own(self, x: Tensor) -> Tensor:
        """Select its heads; without a copy if all."""
        return x if len(self.heads) == x.shape[1] else x[:, self.heads]

    def bias_gain(self) -> Float[Tensor, " heads"]:
        """A position bias belongs to the position part."""
        return self.gains[POSITION]


class Dial(Handle):
    """A dialled model: `turn` sets new gains, `undo` or the end of the context restores the model."""

    def __init__(self, changes: ExitStack, gains: dict[int, Gains]) -> None:
        super().__init__(changes, "the dial")
        self._gains = gains

    def turn(
        self,
        heads: Selection = None,
        *,
        symmetric: float = 1.0,
        skew: float = 1.0,
        popularity: float = 1.0,
        query_only: float = 1.0,
        position: float = 1.0,
    ) -> None:
        """Set the gains of some of the dialled heads; all others are reset to 1. Default: all heads.

        >>> model = kq.Encoder(8, depth=2, heads=2).eval()
        >>> with kq.dial(model) as dial:
        ...     dial.turn("0.*", skew=0)
        """
        self.require()
        values = _checked(symmetric, skew, popularity, query_only, position)
        chosen = select(heads, {index: gains.heads for index, gains in self._gains.items()})
        for index, gains in self._gains.items():
            at = torch.tensor([head in chosen.get(index, ()) for head in gains.heads])
            gains.set(torch.where(at, values[:, None], 1.0))


def dial(
    model: nn.Module,
    symmetric: float = 1.0,
    skew: float = 1.0,
    popularity: float = 1.0,
    query_only: float = 1.0,
    position: float = 1.0,
    heads: Selection = None,
    *,
    data: Iterable[Batch] | Means | None = None,
    means: str | None = None,
) -> Dial:
    """Scale the parts of attention scores in a running model; its weights are not modified.

    score = α·symmetric + β·skew + γ·popularity + ε·query_only + δ·position, with all gains 1 in the original model.

    Parameters
    ----------
    model
        A live model in eval mode.
    symmetric, skew, popularity, query_only, position
        Gains on the parts (`docs/decomposition.md`); 0 ablates a part. Default: 1.
    heads
        Pairs (layer, head), or strings such as "3.*" and "0.1". Default: all.
    data
        Batches on which the means are measured, or `Means`. Default: the means of each batch, over all its tokens, so
        that results depend on how texts are batched.
    means
        "position": one mean per position, as in `kq.look`; "global": one for all positions. Default: "position" if
        `data` has at least 32 sequences, else "global".

    Returns
    -------
    Dial
        A context manager, or a handle with `.turn()` and `.undo()`.

    Raises
    ------
    ValueError
        If the model has active dropout, a head does not exist or is already changed, or a gain is out of range.

    Examples
    --------
    >>> model, x = kq.Encoder(8, depth=1, heads=2).eval(), torch.randn(1, 5, 8)
    >>> before = model(x)
    >>> with kq.dial(model, skew=0):
    ...     ablated = model(x)
    >>> torch.equal(model(x), before), torch.equal(ablated, before)
    (True, False)

    See Also
    --------
    ablate : The change of the loss with each part ablated.
    project : Replace the QK form of one head.
    """
    model = check_model(model)
    values = _checked(symmetric, skew, popularity, query_only, position)
    if means is not None:
        check_choice("means", means, MEANS)
    if data is None and means == "position":
        raise ValueError('means="position" needs data: batches for the model')
    sites = sites_of(model)
    chosen = select(heads, {index: range(site.count) for index, site in sites.items()}, labels_of(sites))
    moved = values[POSITION] != 1 or values[PARTS.index("query_only")] != 1
    if moved and (odd := next((sites[i] for i in chosen if sites[i].position in (*VECTORS, *TABLES)), None)):
        raise ValueError(f"{odd.name} has {odd.position} position terms, which the dial cannot scale")
    measured = data if data is None or isinstance(data, Means) else Means(model, data, means)
    gains = {
        index: Gains(
            numbers, values[:, None].expand(-1, len(numbers)), None if measured is None else measured.of(sites[index])
        )
        for index, numbers in chosen.items()
    }

    def change(changes: ExitStack) -> Dial:
        rewrite(model, sites, gains, changes)
        return Dial(changes, gains)

    return lasting(model, change)


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
        kind = kind or "position"
        self.kind = kind
        layers = next(iter(sites_of(model).values())).found
        self._scales = {layer.index: layer.scale for layer in layers}
        self._of = position_means(model, batches, layers)

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

    def _read(self, index: int) -> tuple[Float[Tensor, "places heads r"], Float[Tensor, "places heads r"]]:
        own: PositionMeans = self._of[index]
        if self.kind == "global":
            query, key = (mean[None] for mean in own.everywhere())
        else:
            places = torch.arange(own.counts.shape[1])
            query, key = (mean[0].transpose(0, 1) for mean in own.at(places[None]))
        return query / self._scales[index], key


def _checked(*gains: Any) -> Float[Tensor, 5]:
    for name, gain in zip(PARTS, gains, strict=True):
        check_number(name, gain)
        if abs(gain) > MOST:
            raise ValueError(f"{name} must be a gain from −{MOST:g} to {MOST:g}, got {gain:g}")
    return torch.tensor([float(gain) for gain in gains], dtype=torch.float64)
