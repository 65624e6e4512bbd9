"""Single directions of a head, scaled in a running model: singular directions of M, eigenvectors of S, planes of A.

A direction is a term D = σuvᵀ, λeeᵀ or ω(stᵀ − tsᵀ) of a decomposition, between components of query and key along those
vectors. With a gain g the score becomes xᵀMy + (g − 1)·xᵀDy. Under RoPE the vectors are those of M(0), and the
term is what the head computes between the same two components at every offset,

    σ(Δ) = uᵀM(Δ)v      λ(Δ) = eᵀM(Δ)e      ω(Δ) = ½(sᵀM(Δ)t − tᵀM(Δ)s),

which at offset 0 is the value of the direction. Each component is a linear function of [q; k], so that the term is a
product of further dimensions of q and k: one per vector pair, or r under RoPE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints.layer import LatentLayer
from keyquery.forms import Form, Rope
from keyquery.intervene.dial.means import Means, SiteMeans
from keyquery.intervene.project.rotary_planes import inverse, pairs
from keyquery.intervene.selection import select
from keyquery.intervene.sites import Context, Rewrite, Site, labels_of
from keyquery.listening import Batch
from keyquery.support.checks import check_choice, check_count, check_number, checked_integers

KINDS = ("singular", "symmetric", "skew")
BASES = ("weights", "data")
MAX_GAIN = 1e4  # larger ones overflow in half precision
Directions = Mapping["str | tuple[int, int]", "int | Sequence[int]"]  # numbers of directions, by head


class Basis(NamedTuple):
    """The directions of a head, strongest first: value, share of ‖M‖², ‖S‖² or ‖A‖², and terms on [q; k].

    Direction i has the terms (left[i]·[q; k]) (right[i]·[q; k]′) f(Δ), f(Δ) = Σ over rotary planes of
    Re(e^{iΔω}·curve), or a constant.
    """

    values: Float[Tensor, " count"]  # singular values or eigenvalues
    shares: Float[Tensor, " count"]  # of the squared norm
    left: Float[Tensor, "count terms n"]  # terms on [q; k] of the query
    right: Float[Tensor, "count terms n"]  # terms on [q; k] of the key
    curves: Float[Tensor, "count terms r"]  # dependence on the offset, by rotary pair


def basis_of(kind: str, gram: Float[Tensor, "n n"], rope: Rope | None, count: int | None = None) -> Basis:
    """Directions of a head from the Gram matrix of its [Q; K], or from the covariance of [q; k] on data."""
    form = Form.from_gram(gram.detach().double())
    query, key = form.wide()
    if kind == "singular":
        left, values, right = form.svd(count)
        ends = [(left, right)]
    elif kind == "symmetric":
        values, vectors = form.eigh(count)
        order = values.abs().argsort(descending=True)
        values, vectors = values[order], vectors[:, order]
        ends = [(vectors, vectors)]
    else:
        values, source, target = form.skew_planes(count)
        ends = [(source, target), (target, source)]
    functionals = inverse(torch.cat((query, key)))  # components of a token from its [q; k]
    left, right = (torch.stack([pair[side].mT @ functionals for pair in ends], 1) for side in (0, 1))
    curves = torch.stack([_curve(query @ a, key @ b, rope) for a, b in ends], 1)
    curves = (curves - curves.flip(1)) / 2 if kind == "skew" else curves
    whole = {"singular": form, "symmetric": form.symmetric, "skew": form.skew}[kind].norm2
    energy = values.square() * (2 if kind == "skew" else 1)
    return Basis(values, energy / torch.where(whole > 0, whole, 1.0), left, right, curves)


def _curve(query: Float[Tensor, "r count"], key: Float[Tensor, "r count"], rope: Rope | None) -> Tensor:
    """qᵀR(Δ)k as a function of Δ, (count, r): per rotary plane conj(q)·k, as a complex number; else products."""
    out = (query * key).mT.clone()
    if rope is not None:
        first, second = pairs(rope, query.device)
        q, k = (torch.complex(t[first], t[second]) for t in (query, key))
        planes = (q.conj() * k).mT
        out[:, first], out[:, second] = planes.real, planes.imag
    return out


class DirectionGains(Rewrite):
    """A rewrite of one head by gains on some of its directions; a position bias is none, and stays.

    `centre` are the parts of q and k that do not count: the biases, or the means on data.
    """

    def __init__(
        self, head: int, basis: Basis, numbers: Sequence[int], gain: float, rope: Rope | None, centre: SiteMeans
    ) -> None:
        self.heads = [head]
        self.basis = basis
        self.numbers, self._gain = list(numbers), gain
        self._rope, self._centre = rope, centre
        self._unit = torch.ones(basis.curves.shape[-1], dtype=torch.float64)
        if rope is not None:  # 1 in every rotary plane
            self._unit[pairs(rope, self._unit.device)[1]] = 0.0

    def __call__(self, context: Context) -> tuple[Float[Tensor, "batch 1 n w"], Float[Tensor, "batch 1 m w"]]:
        """The head's queries and keys, with the further dimensions."""
        query, key = context.queries[:, self.heads], context.keys[:, self.heads]
        if self._gain == 1:
            return query[..., -context.new :, :], key
        left, right, curves = (part[self.numbers].flatten(0, 1) for part in self.basis[2:])
        contents = self._contents(context, query, key)
        along_query = contents[..., -context.new :, :] @ ((self._gain - 1) * left).to(contents).mT
        along_key = contents @ right.to(contents).mT
        if self._rope is None:
            along_query = along_query * curves.sum(-1).to(contents)
        else:
            positions = context.turned.unsqueeze(1)
            length = contents.shape[-2]
            unit = context.turn.rotate(self._unit.to(contents).expand(1, length, -1), positions)
            turned = context.turn.rotate(curves.to(contents)[:, None].expand(-1, length, -1), positions).transpose(1, 2)
            along_query = (along_query.unsqueeze(-1) * unit[:, :, -context.new :, None]).flatten(-2)
            along_key = (along_key.unsqueeze(-1) * turned.unsqueeze(1)).flatten(-2)
        query = query[..., -context.new :, :]
        return torch.cat((query, along_query.to(query)), -1), torch.cat((key, along_key.to(key)), -1)

    def _contents(self, context: Context, query: Tensor, key: Tensor) -> Float[Tensor, "batch 1 m n"]:
        """[q; k] less its centre, unrotated, in float32 at least."""
        wide = torch.promote_types(key.dtype, torch.float32)
        centre = (mean[:, self.heads] for mean in self._centre.at(context))
        positions = context.turned.unsqueeze(1)
        contents = (x.to(wide) - mean.to(wide) for x, mean in zip((query, key), centre, strict=True))
        return torch.cat([context.turn.back(x, positions) for x in contents], -1)


def _check_site(site: Site, basis: str) -> None:
    """Raise if the heads of a site have no directions of this kind."""
    layer = site.read()
    if isinstance(layer, LatentLayer):
        raise ValueError(f"{site.name} is an MLA layer, whose heads have two QK forms: directions are not supported")
    if getattr(site.module, "kernel", None) == "rbf":
        raise ValueError(f"{site.name} has an rbf kernel, whose scores are no QK form: it has no directions")
    if basis == "weights" and (layer.query_norm is not None or layer.key_norm is not None):
        raise ValueError(
            f'{site.name} has QK-norm, so that its scores are no bilinear form of the weights: use on="data"'
        )


def _count_of(site: Site, kind: str) -> int:
    """How many directions of a kind a head of a site can have."""
    form = site.read().form
    return min(form.rank, form.dim) if kind == "singular" else min(2 * form.rank, form.dim) // (1 + (kind == "skew"))


def _checked_numbers(name: str, numbers: Iterable[int] | int, most: int) -> list[int]:
    """Numbers of directions, each from 0 to most − 1."""
    chosen = checked_integers(f"directions of {name}", [numbers] if isinstance(numbers, int) else numbers)
    if not chosen:
        raise ValueError(f"directions of {name} must name at least one, got none")
    check_count(f"a direction of {name}", max(chosen), 0, most - 1)
    return sorted(set(chosen))


def direction_gains(
    model: nn.Module,
    sites: Mapping[int, Site],
    directions: Directions,
    of: str,
    gain: float,
    on: str,
    data: Iterable[Batch] | Means | None,
    means: str | None,
) -> dict[tuple[int, int], DirectionGains]:
    """Rewrites of the chosen heads, all arguments checked first."""
    check_choice("of", of, KINDS)
    check_choice("on", on, BASES)
    check_gain("gain", gain)
    if not isinstance(directions, Mapping) or not directions:
        raise TypeError("directions must map heads to numbers of directions, such as {(18, 6): [0, 1]}")
    if (on == "data") != (data is not None):
        raise ValueError('on="data" needs data: batches for the model' if data is None else 'data needs on="data"')
    known, labels = {index: range(site.count) for index, site in sites.items()}, labels_of(dict(sites))
    chosen: dict[tuple[int, int], list[int]] = {}
    for selector, numbers in directions.items():
        for index, heads in select([selector], known, labels).items():
            _check_site(sites[index], on)
            for head in heads:
                chosen[index, head] = _checked_numbers(f"{index}.{head}", numbers, _count_of(sites[index], of))
    measured = data if data is None or isinstance(data, Means) else Means(model, data, means)
    rewritten = {}
    for index in sorted({index for index, _ in chosen}):
        site = sites[index]
        centre = _biases(site) if measured is None else measured.of(site)
        grams = _weights_gram(site) if measured is None else measured.covariance(site)
        for head in (head for layer, head in chosen if layer == index):
            basis = basis_of(of, grams[head], site.turn.rope, _count_of(site, of))
            numbers = chosen[index, head]
            rewritten[index, head] = DirectionGains(head, basis, numbers, float(gain), site.turn.rope, centre)
    return rewritten


def _weights_gram(site: Site) -> Float[Tensor, "heads n n"]:
    form = site.read().form
    return form.gram().flatten(0, len(form.batch) - 1).cpu()


def _biases(site: Site) -> SiteMeans:
    """Biases of queries and keys, (1, heads, r), 0 without."""
    weights = site.read().weights
    zeros = weights.query.new_zeros(weights.query.shape[:3])
    biases = (zeros if bias is None else bias.expand_as(zeros) for bias in (weights.query_bias, weights.key_bias))
    return SiteMeans(*(bias.flatten(0, 1)[None] for bias in biases))


def check_gain(name: str, gain: Any) -> None:
    """Require a gain that does not overflow in half precision."""
    check_number(name, gain)
    if abs(gain) > MAX_GAIN:
        raise ValueError(f"{name} must be a gain from −{MAX_GAIN:g} to {MAX_GAIN:g}, got {gain:g}")
