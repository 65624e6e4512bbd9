"""`dial`: scale parts of attention scores in a running model, without changing its weights.

With the mean query q̄ᵢ and the mean key k̄ⱼ at each position, and contents q′ = q − q̄ and k′ = k − k̄, all rotated as in
the model, the score of query i and key j is exactly the sum of the parts of `forms.parts`. With gains on them

    symmetric α      skew β      popularity γ      query_only ε      position δ

it is still one product, q̃·k̃, of vectors up to three times as wide (x̂ is x rotated by the negative angle):

    q̃ = [½(α+β)q′ + γq̄ , ½(α−β)k̂′ , εq′ + δq̄]      k̃ = [k′ , q̂′ , k̄]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints.positions.relative import GIVEN, TABLES, VECTORS
from keyquery.forms.parts import PARTS
from keyquery.intervene.dial.directions import Directions, check_gain, direction_gains
from keyquery.intervene.dial.means import MEANS, Means, SiteMeans
from keyquery.intervene.dial.widen import HalfTurn, widen
from keyquery.intervene.handle import Handle, check_model, lasting
from keyquery.intervene.rewrites import rewrite, sites_of
from keyquery.intervene.selection import Selection, select
from keyquery.intervene.sites import Context, Rewrite, Site, labels_of
from keyquery.listening import Batch, batches_of
from keyquery.listening.exclusive import Changes
from keyquery.support.checks import check_choice

POSITION = PARTS.index("position")


class Gains(Rewrite):
    """A rewrite of some heads of a layer by gains on the five parts, (5, heads)."""

    def __init__(self, heads: Sequence[int], gains: Tensor, means: SiteMeans | None) -> None:
        self.heads, self._means = list(heads), means
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None  # rotations, and the means rotated to them
        self._turned: tuple[Tensor, HalfTurn] | None = None  # rotations, and those of swapped contents
        self.set(gains)

    def set(self, gains: Float[Tensor, "5 heads"]) -> None:
        """Set new gains."""
        self.gains, self._moves_bias = gains, bool((gains[POSITION] != 1).any())
        self._idle = bool((gains == 1).all())
        self._across = not torch.equal(gains[0], gains[1])

    def __call__(self, context: Context) -> tuple[Float[Tensor, "batch heads n w"], Float[Tensor, "batch heads m w"]]:
        """q̃ of the new tokens and k̃ of all."""
        queries, keys = self._own(context.queries), self._own(context.keys)
        if self._idle:  # unchanged heads keep their original path
            return queries[..., -context.new :, :], keys
        if self.gains.device != keys.device:  # moved once; kernels take float32
            self.gains = self.gains.to(keys.device, torch.promote_types(keys.dtype, torch.float32))
        by_position = self._means is not None and self._means.by_position
        # Otherwise constant per query, and softmax is invariant to it.
        placed = context.turn.rope is not None or context.constants or by_position
        turn = self._half_turn(context) if self._across else None
        return widen(queries, keys, *self._at(context), self.gains, context.new, self._across, placed, turn)

    def _half_turn(self, context: Context) -> HalfTurn | None:
        """The rotation R(−2t) of swapped contents; cached while positions stay the same."""
        rope, dtype = context.turn.rope, torch.promote_types(context.keys.dtype, torch.float32)
        if rope is None:
            return None
        if self._turned is None or self._turned[0] is not context.turned or self._turned[1].cos.dtype != dtype:
            angles = 2 * rope.angles(context.turned).to(context.keys.device)
            turn = HalfTurn(angles.cos().to(dtype), angles.sin().to(dtype), context.turn.start, rope.interleaved)
            self._turned = context.turned, turn
        return self._turned[1]

    def _at(self, context: Context) -> tuple[Tensor, Tensor]:
        """Means of its heads at every position; cached while positions stay the same."""
        if self._means is None:
            means = SiteMeans(*(mean[None] for mean in context.means()))
            query, key = (self._own(mean) for mean in means.at(context))
            return query, key
        kept = self._kept
        if kept is None or kept[0] is not context.turned or kept[1].dtype != context.keys.dtype:
            query, key = (self._own(mean).contiguous() for mean in self._means.at(context))
            kept = self._kept = context.turned, query, key
        return kept[1:]

    def _own(self, x: Tensor) -> Tensor:
        """Select its heads; without a copy if all."""
        return x if len(self.heads) == x.shape[1] else x[:, self.heads]

    def bias_gain(self) -> Float[Tensor, " heads"] | None:
        """A position bias belongs to the position part."""
        return self.gains[POSITION] if self._moves_bias else None


class Dial(Handle):
    """A dialled model: `turn` sets new gains, `undo` or the end of the context restores the model."""

    def __init__(self, changes: Changes, gains: Mapping[int, Gains]) -> None:
        super().__init__(changes, "dial")
        self._gains = gains  # by site; none for a dial of directions

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
        values = _checked(symmetric, skew, popularity, query_only, position)
        self.require()
        if not self._gains:
            raise ValueError("this dial scales directions, not parts: make a new one")
        chosen = select(heads, {index: gains.heads for index, gains in self._gains.items()})
        for index, gains in self._gains.items():
            turned = torch.tensor([head in chosen.get(index, ()) for head in gains.heads])
            gains.set(torch.where(turned, values[:, None], 1.0))


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
    directions: Directions | None = None,
    of: str = "singular",
    gain: float = 0.0,
    on: str = "weights",
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
    directions
        Scale single directions of some heads instead of parts: their numbers, strongest first, by head, such as
        `{(18, 6): [0, 1]}` or `{"18.6": [0, 1]}`. Default: none.
    of
        Of which matrix: "singular" triples σuvᵀ of M, eigenvectors λeeᵀ of its "symmetric" part, or planes
        ω(stᵀ − tsᵀ) of its "skew" part. Under RoPE of M(0); see `docs/surgery.md`. Default: "singular".
    gain
        Of these directions; 0 ablates them. Default: 0.
    on
        "weights": M of the weights, and tokens as they enter the projections, so that popularity moves too; "data":
        Σ^½MΣ^½ with the covariance of `data`, and tokens less their mean, which leaves it. Default: "weights".

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
    >>> with kq.dial(model, directions={(0, 1): [0]}, of="skew"):  # without the strongest rotation plane
    ...     ablated = model(x)

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
    data = data if data is None or isinstance(data, Means) else list(batches_of(data))
    sites = sites_of(model, next(iter(data), None) if isinstance(data, list) else None)
    chosen = select(heads, {index: range(site.count) for index, site in sites.items()}, labels_of(sites))
    gains: dict[int, Gains] = {}
    rewrites: list[tuple[int, Rewrite]] = []
    if directions is not None:
        if bool((values != 1).any()) or heads is not None:
            raise ValueError("directions are scaled by `gain` and name their heads: omit heads and gains on parts")
        scaled = direction_gains(model, sites, directions, of, gain, on, data, means)
        rewrites = [(index, new) for (index, _), new in scaled.items()]
    else:
        _check_terms([sites[index] for index in chosen], values)
        measured = data if data is None or isinstance(data, Means) else Means(model, data, means)
        for index, numbers in chosen.items():
            of_site = None if measured is None else measured.of(sites[index])
            gains[index] = Gains(numbers, values[:, None].expand(-1, len(numbers)), of_site)
        rewrites = list(gains.items())

    def change(changes: Changes) -> Dial:
        rewrite(model, sites, rewrites, changes)
        return Dial(changes, gains)

    return lasting(model, change)


def _check_terms(sites: Sequence[Site], gains: Tensor) -> None:
    """Raise if gains scale what enters terms of positions that are not read as a product."""
    if gains[POSITION] != 1 or gains[PARTS.index("query_only")] != 1:
        for site in sites:
            if site.position in (*VECTORS, *TABLES, *GIVEN):
                raise ValueError(f"{site.name} has {site.position} position terms, which the dial cannot scale")


def _checked(*gains: Any) -> Float[Tensor, "5"]:
    for name, gain in zip(PARTS, gains, strict=True):
        check_gain(name, gain)
    return torch.tensor([float(gain) for gain in gains], dtype=torch.float64)
