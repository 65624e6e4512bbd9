"""The dial: parts of any head's scores turned up or down in a running model, its weights untouched.

With q = q̄ + q′ and k = k̄ + k′, each rotated as the model does, the score of query i and key j is exactly

    ½(q′ᵢ·k′ⱼ + k′ᵢ·q′ⱼ)  +  ½(q′ᵢ·k′ⱼ − k′ᵢ·q′ⱼ)  +  q̄·k′ⱼ  +  qᵢ·k̄
      reciprocal  α           directional  β          popularity γ  position δ

and with gains on the parts it is still one product, q̃·k̃, of vectors up to three times as wide:

    q̃ = [½(α+β)q′ + γq̄ , ½(α−β)k′ , δq]      k̃ = [k′ , q′ , k̄]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture import Batch, batches_of, joint_moments
from keyquery.forms.checks import check_number
from keyquery.surgery.attach import check_unchanged, rewrite, sites_of
from keyquery.surgery.handles import Handle, check_model, lasting
from keyquery.surgery.selection import Selection, select
from keyquery.surgery.sites import Call, Site
from keyquery.surgery.wide import widen

MOST = 1e4  # beyond, scores of short floats overflow
PARTS = ("reciprocal", "directional", "popularity", "position")


class Gains:
    """A rewrite of some heads of a layer by gains on the four parts, (4, heads)."""

    def __init__(self, heads: Sequence[int], gains: Tensor, means: tuple[Tensor, Tensor] | None) -> None:
        self.heads, self._means = list(heads), means
        self._turned: tuple[Tensor, Tensor, Tensor] | None = None  # places, and the means turned to them
        self.set(gains)

    def set(self, gains: Float[Tensor, "4 heads"]) -> None:
        """Other gains from now on."""
        self.gains = self._near = gains
        self._idle, self._across = bool((gains == 1).all()), not torch.equal(gains[0], gains[1])

    def __call__(self, call: Call) -> tuple[Float[Tensor, "batch heads n w"], Float[Tensor, "batch heads m w"]]:
        """q̃ of the new tokens and k̃ of all."""
        queries, keys = self._own(call.queries), self._own(call.keys)
        if self._idle:  # a sweep turns a few heads at a time: all others go as they always do
            return queries[..., -call.new :, :], keys
        self._near = self._near.to(keys.device)  # moved once, not at every call
        at_query, at_key = self._at(call)
        placed = call.turn.rope is not None or call.constants  # else the same for every key: softmax does not see it
        return widen(queries, keys, at_query, at_key, self._near, call.new, self._across, placed)

    def _at(self, call: Call) -> tuple[Tensor, Tensor]:
        """The means of its heads at every place; those of data are turned once while places stay the same."""
        if self._means is None:
            query, key = (self._own(call.at(mean)) for mean in call.means())
            return query, key
        if self._turned is None or self._turned[0] is not call.places or self._turned[1].dtype != call.keys.dtype:
            query, key = (self._own(call.at(mean)) for mean in self._means)
            self._turned = call.places, query, key
        return self._turned[1:]

    def _own(self, x: Tensor) -> Tensor:
        """Of its heads; all of them need no copy."""
        return x if len(self.heads) == x.shape[1] else x[:, self.heads]

    def bias_gain(self) -> Float[Tensor, " heads"]:
        """A bias by position is part of position."""
        return self.gains[3]


class Dial(Handle):
    """A dialled model: `turn` moves the dial, `undo` or the end of the context gives the model back."""

    def __init__(self, changes: ExitStack, gains: dict[int, Gains]) -> None:
        super().__init__(changes, "the dial")
        self._gains = gains

    def turn(
        self,
        heads: Selection = None,
        *,
        reciprocal: float = 1.0,
        directional: float = 1.0,
        popularity: float = 1.0,
        position: float = 1.0,
    ) -> None:
        """Set the gains of some of the dialled heads, all by default; all others go back to 1.

        >>> model = kq.Encoder(8, depth=2, heads=2).eval()
        >>> with kq.dial(model) as dial:
        ...     dial.turn("0.*", directional=0)
        """
        self.require()
        values = _checked(reciprocal, directional, popularity, position)
        chosen = select(heads, {index: gains.heads for index, gains in self._gains.items()})
        for index, gains in self._gains.items():
            at = torch.tensor([head in chosen.get(index, ()) for head in gains.heads])
            gains.set(torch.where(at, values[:, None], 1.0))


def dial(
    model: nn.Module,
    reciprocal: float = 1.0,
    directional: float = 1.0,
    popularity: float = 1.0,
    position: float = 1.0,
    heads: Selection = None,
    *,
    data: Iterable[Batch] | Means | None = None,
) -> Dial:
    """Turn the parts of a running model's heads up or down; 1 is as it was, 0 is off. Weights stay untouched.

    A context, or a handle with `.undo()`. `heads` are pairs (layer, head), or texts such as "3.*" and "0.1"; None is
    all. Means q̄ and k̄ are those of `data`, batches that the model takes; without it, of the real tokens of each batch
    at hand, so that what a text gives depends on what it is batched with. Position has an effect only where positions
    enter the score: RoPE, ALiBi, relative biases.

    >>> model, x = kq.Encoder(8, depth=1, heads=2).eval(), torch.randn(1, 5, 8)
    >>> before = model(x)
    >>> with kq.dial(model, directional=0):
    ...     without = model(x)
    >>> torch.equal(model(x), before), torch.equal(without, before)
    (True, False)
    """
    model = check_model(model)
    values = _checked(reciprocal, directional, popularity, position)
    sites = sites_of(model)
    chosen = select(heads, {index: range(site.count) for index, site in sites.items()})
    if values[3] != 1 and (odd := next((sites[i] for i in chosen if sites[i].position == "disentangled"), None)):
        raise ValueError(f"{odd.name} scores positions by terms of their own, which the dial does not reach")
    means = None if data is None else data if isinstance(data, Means) else Means(model, data)
    gains = {
        index: Gains(some, values[:, None].expand(-1, len(some)), None if means is None else means.of(sites[index]))
        for index, some in chosen.items()
    }

    def change(changes: ExitStack) -> Dial:
        rewrite(model, sites, gains, changes)
        return Dial(changes, gains)

    return lasting(model, change)


class Means:
    """Mean queries and keys of every layer over data, to be used by several dials of one model."""

    def __init__(self, model: nn.Module, data: Iterable[Batch]) -> None:
        check_unchanged(model)
        found = next(iter(sites_of(model).values())).found
        self._of = {index: moments.mean for index, moments in joint_moments(model, batches_of(data), found).items()}

    def of(self, site: Site) -> tuple[Float[Tensor, "heads r"], Float[Tensor, "heads r"]]:
        """A site's mean query and key, unturned."""
        query, key = self._of[site.index].chunk(2, -1)
        if not site.turn.start:
            return query, key
        # A latent head: its two kernels side by side, and pairs sorted as the module sorts them.
        if site.sorted:
            query, key = (torch.cat((t[:, 0::2], t[:, 1::2]), -1) for t in (query, key))
        still = self._of[site.index - 1].chunk(2, -1)
        return torch.cat((still[0], query), -1), torch.cat((still[1], key), -1)


def _checked(*gains: Any) -> Float[Tensor, 4]:
    for name, gain in zip(PARTS, gains, strict=True):
        check_number(name, gain)
        if abs(gain) > MOST:
            raise ValueError(f"{name} must be a gain from −{MOST:g} to {MOST:g}, got {gain:g}")
    return torch.tensor([float(gain) for gain in gains], dtype=torch.float64)
