"""Layer: the heads of one attention layer as Forms, in the views "raw" and "folded", and as queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import Form, Rope
from keyquery.forms.rope import AxialRope
from keyquery.support.checks import check_choice, check_count
from keyquery.support.printable import REPR, printable

# Position terms that are no function of one offset, or depend on the content of one token.
GRIDS = {"axial", "window", "window with class", "continuous", "decomposed", "transformer-xl", "xlnet"}
GRIDS |= {"relative keys", "shaw", "context"}
VIEWS = {"raw": "form", "biased": "biased", "folded": "folded"}  # views of a head, and their properties


@dataclass(frozen=True, eq=False)
class Projections:
    """Query and key weights of one layer, (kv heads, queries per kv head, r, d), with biases."""

    query: Float[Tensor, "groups shared r d"]
    key: Float[Tensor, "groups 1 r d"]
    query_bias: Float[Tensor, "groups shared r"] | None = None
    key_bias: Float[Tensor, "groups 1 r"] | None = None

    def form(self) -> Form:
        """The heads as Forms, without their biases."""
        return Form(self._flat(self.query), self._flat(self.key))

    def biased(self) -> Form:
        """The heads as Forms in d + 1 dimensions, or `form` if there are no biases."""
        if self.query_bias is None and self.key_bias is None:
            return self.form()
        biases = (None if bias is None else self._flat(bias) for bias in (self.query_bias, self.key_bias))
        return self.form().with_bias(*biases)

    def apply(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of tokens x (..., n, d) and keys of y (..., m, d): (..., groups, shared or 1, n or m, r).

        Where queries and keys are of different widths, the weights of queries come first, and those of keys last.
        """
        query, key = self.query[..., : x.shape[-1]], self.key[..., -y.shape[-1] :]
        return _linear(x, query, self.query_bias), _linear(y, key, self.key_bias)

    def __repr__(self) -> str:
        return f"Projections({self.query.shape[0]} × {self.query.shape[1]} heads, {_sized(self.query)})"

    def _flat(self, tensor: Tensor) -> Tensor:
        """Without the GQA dimension, if queries are not grouped."""
        return tensor.squeeze(1) if self.query.shape[1] == 1 else tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm: x → γ·x/rms(x) if `kind` is "rms", γ·(x − mean)/std + β if it is "layer"."""

    kind: str
    gain: Float[Tensor, "*shape"]
    shift: Float[Tensor, "*shape"] | None = None
    eps: float = 1e-6
    by_head: bool = False  # of queries or keys: each head by itself, though it has gains of its own

    def __repr__(self) -> str:
        return f"Norm({self.kind}, {_sized(self.gain)}{'' if self.shift is None else ', shifted'}, eps={self.eps:g})"

    def __call__(self, x: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
        """The normed x, its statistics taken over `dims`."""
        x = x - x.mean(dims, keepdim=True) if self.kind == "layer" else x
        x = x * self.gain.to(x.dtype) / (x.square().mean(dims, keepdim=True) + self.eps).sqrt()
        return x if self.shift is None else x + self.shift.to(x.dtype)


@dataclass(frozen=True, eq=False)
class Layer:
    """The heads of one attention layer, and how the model uses them.

    Forms have the heads as their batch: (heads,), or (key heads, queries that share one) where queries are grouped.
    """

    index: int  # among all attention layers of the checkpoint, from 0
    name: str  # of the attention module
    kind: str  # "self" or "cross"
    causal: bool  # whether a query sees earlier tokens only
    weights: Projections  # query and key projections with biases
    scale: float  # by which the score is multiplied
    rope: Rope | None = None  # rotary positions, if any
    axial: AxialRope | None = None  # rotary positions of tokens on a grid, in place of `rope`
    early_rope: Rope | None = None  # in place of `rope`, where queries and keys are rotated before they are normed
    window: int | None = None  # a query sees keys less than so many tokens away; None: all
    chunk: int | None = None  # a query sees keys of its own chunk of so many tokens alone; None: all
    context: int | None = None  # how many positions its scores are read for; None: all
    position: str = "none"  # how positions enter the score: "none", "rope", "alibi", …
    norm: Norm | None = None  # feeds the queries, and in self-attention the keys
    memory_norm: Norm | None = None  # feeds the keys of cross-attention
    query_norm: Norm | None = None  # of each query, (1, 1, r), or of all heads' together
    key_norm: Norm | None = None  # of each key, likewise
    modules: Mapping[str, str] = field(default_factory=dict)  # names of submodules by role
    notes: tuple[str, ...] = ()  # what a reader should know
    label: str = ""  # what to call it: "encoder 0", "cross 3", "0 rope", or its index
    learned: bool = False  # queries are learned tokens, which the model does not project
    pool: str | None = None  # how tokens are merged into one query, in layers that have fewer queries than keys
    softcap: float | None = None  # c: the model uses c·tanh(s/c) of the scaled score s

    def __repr__(self) -> str:
        facts = [f"{self.heads} heads", _sized(self.weights.query), *(["causal"] if self.causal else [])]
        facts += [f"position {self.position}"] if self.position != "none" else []
        facts += ["cross-attention"] if self.kind == "cross" else []
        return printable(f"{type(self).__name__} {self.index}({self.name}: {', '.join(facts)})", REPR)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.weights.query.shape[0] * self.weights.query.shape[1]

    @property
    def on_data(self) -> bool:
        """Whether its scores on data are divided into parts: keys are of the same tokens, and not normed when rotated.

        XLNet's queries are made by no module whose input could be read.
        """
        return self.kind == "self" and self.early_rope is None and self.position != "xlnet"

    @property
    def by_offset(self) -> bool:
        """Whether positions enter its scores by the offset of two tokens alone, or not at all."""
        return self.axial is None and self.early_rope is None and self.position not in GRIDS

    def head(self, index: int, view: str = "raw") -> Form:
        """The form of one query head, with the key head that it uses, also where several query heads share one.

        `view` is "raw", "biased" or "folded".
        """
        check_count("index", index, 0, self.heads - 1)
        check_choice("view", view, VIEWS)
        form: Form = getattr(self, VIEWS[view])
        return form[index] if len(form.batch) == 1 else form[divmod(index, form.batch[1])]

    @property
    def form(self) -> Form:
        """View "raw": the weights alone, comparable with published scores."""
        return self.weights.form()

    @property
    def biased(self) -> Form:
        """The weights with their biases and the gains of query and key norms: what acts on the layer's input."""
        return self.gained().biased()

    @property
    def folded(self) -> Form:
        """View "folded": `biased`, with gain and shift of the norm that feeds the layer folded in.

        What is the same for every key is left out, since softmax does not see it: the key's constant q·b_k, but for
        dimensions that RoPE rotates and keys that are normed.

        With query and key norms it is exact up to the positive factor 1/(rms q · rms k) of each pair of tokens.
        """
        weights = self.gained()
        memory = self.memory_norm if self.kind == "cross" else self.norm
        first, last = (None if norm is None else norm.gain.shape[-1] for norm in (self.norm, memory))
        query, query_bias = _fold(weights.query, weights.query_bias, self.norm, slice(first))
        key, key_bias = _fold(weights.key, weights.key_bias, memory, slice(last and -last, None))
        return Projections(query, key, query_bias, self._seen_bias(key_bias)).biased()

    def _seen_bias(self, bias: Tensor | None) -> Tensor | None:
        """The key's constant as far as it differs from key to key."""
        if bias is None or self.key_norm is not None:
            return bias
        rope = self.rope if self.axial is None else self.axial.rope
        if rope is None:
            return None
        rotated = torch.arange(bias.shape[-1], device=bias.device) < rope.dims
        return bias * rotated

    def project(
        self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m e"] | None = None
    ) -> tuple[Float[Tensor, "*batch groups shared n r"], Float[Tensor, "*batch groups 1 m r"]]:
        """Queries of the tokens x and keys of y (x itself in self-attention), as the scores use them, but unrotated."""
        query, key = self.weights.apply(x, x if y is None else y)
        return _normed(query, self.query_norm), _normed(key, self.key_norm)

    def rotated(
        self, x: Tensor, y: Tensor, rope: Rope | None, queries: Tensor, keys: Tensor
    ) -> tuple[Float[Tensor, "*batch groups shared n r"], Float[Tensor, "*batch groups 1 m r"]]:
        """Queries of the tokens x and keys of y as the scores use them, rotated to positions by `rope`.

        Where they are normed after that, the size of a query or key is the same before and after the rotation, and its
        gain comes last.
        """
        if self.early_rope is None:
            both = self.project(x, y)
            return both if rope is None else (rope.rotate(both[0], queries), rope.rotate(both[1], keys))
        assert self.query_norm is not None
        assert self.key_norm is not None
        ones = torch.ones(1, 1, self.weights.query.shape[2])
        norms = (replace(norm, gain=ones.to(norm.gain)) for norm in (self.query_norm, self.key_norm))
        query, key = (
            self.early_rope.rotate(_normed(t, norm), positions)
            for t, norm, positions in zip(self.weights.apply(x, y), norms, (queries, keys), strict=True)
        )
        gains = (norm.gain.unsqueeze(-2).to(x.dtype) for norm in (self.query_norm, self.key_norm))
        return query * next(gains), key * next(gains)

    def gained(self) -> Projections:
        """diag(γ_q)·W_q and diag(γ_k)·W_k; norms that subtract the mean of q or k do so here too."""
        query, query_bias = _gain(self.weights.query, self.weights.query_bias, self.query_norm)
        key, key_bias = _gain(self.weights.key, self.weights.key_bias, self.key_norm)
        return Projections(query, key, query_bias, key_bias)


@dataclass(frozen=True, eq=False, repr=False)
class LatentLayer(Layer):
    """One kernel of multi-head latent attention; its `weights` are composed of down- and up-projections.

    The latents are normed between the two: q = W_up·γ·c/rms(c) with c = W_down·x, and likewise for keys.
    """

    normed: Projections | None = None  # composed with the latent norms' gains
    query_down: Float[Tensor, "query_latent d"] | None = None  # None: queries have no latent
    key_down: Float[Tensor, "key_latent d"] | None = None  # None: this kernel's keys pass by the latent
    query_down_bias: Float[Tensor, " query_latent"] | None = None
    key_down_bias: Float[Tensor, " key_latent"] | None = None
    eps: float = 1e-6

    def gained(self) -> Projections:
        """The composed weights with the latent norms' gains, and those of query and key norms."""
        assert self.normed is not None
        query, query_bias = _gain(self.normed.query, self.normed.query_bias, self.query_norm)
        key, key_bias = _gain(self.normed.key, self.normed.key_bias, self.key_norm)
        return Projections(query, key, query_bias, key_bias)

    def project(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys, each divided by the root mean square of its token's latent."""
        assert self.normed is not None
        y = x if y is None else y
        query, key = self.normed.apply(x, y)
        query = query / self._rms(x, self.query_down, self.query_down_bias)
        key = key / self._rms(y, self.key_down, self.key_down_bias)
        return _normed(query, self.query_norm), _normed(key, self.key_norm)

    def rolled(self, dims: int) -> LatentLayer:
        """The same with the last `dims` dimensions of each head as the first, which leaves all scores as they are."""

        def roll(tensor: Tensor | None, dim: int) -> Tensor | None:
            return None if tensor is None else tensor.roll(dims, dim)

        both = (
            Projections(w.query.roll(dims, 2), w.key.roll(dims, 2), roll(w.query_bias, 2), roll(w.key_bias, 2))
            for w in (self.weights, self.gained_latents())
        )
        norms = (
            norm and replace(norm, gain=norm.gain.roll(dims, -1), shift=roll(norm.shift, -1))
            for norm in (self.query_norm, self.key_norm)
        )
        weights, normed = both
        query_norm, key_norm = norms
        return replace(self, weights=weights, normed=normed, query_norm=query_norm, key_norm=key_norm)

    def gained_latents(self) -> Projections:
        """The composed weights with the latent norms' gains alone."""
        assert self.normed is not None
        return self.normed

    def _rms(self, x: Tensor, down: Tensor | None, bias: Tensor | None) -> Tensor:
        if down is None:
            return torch.ones((), dtype=x.dtype, device=x.device)
        latent = x @ down.to(x.dtype).mT
        latent = latent if bias is None else latent + bias.to(x.dtype)
        size = (latent.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return size.unsqueeze(-3).unsqueeze(-3)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a dataclass with all of its tensors, on a device; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    held = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    new = {name: moved(part, device) for name, part in held.items()}
    changed = {name: part for name, part in new.items() if part is not held[name]}
    return replace(value, **changed) if changed else value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., n, d) by (groups, shared, r, d): (..., groups, shared, n, r)."""
    out = x.unsqueeze(-3).unsqueeze(-3) @ weight.to(x.dtype).mT
    return out if bias is None else out + bias.to(x.dtype).unsqueeze(-2)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """A norm of the queries or keys (..., groups, shared, n, r): head by head, or over all heads of a token."""
    if norm is None:
        return x
    over_all = norm.gain.shape[:2] != (1, 1) and not norm.by_head
    gain, shift = (None if t is None else t.unsqueeze(-2) for t in (norm.gain, norm.shift))
    assert gain is not None
    return replace(norm, gain=gain, shift=shift)(x, (-4, -3, -1) if over_all else (-1,))


def _gain(weight: Tensor, bias: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    if norm is None:
        return weight, bias
    weight, bias = _wide(weight), None if bias is None else _wide(bias)
    if norm.kind == "layer":
        weight = weight - weight.mean(2, keepdim=True)
        bias = None if bias is None else bias - bias.mean(2, keepdim=True)
    gain = norm.gain.to(weight.dtype)
    return weight * gain.unsqueeze(-1), None if bias is None else bias * gain


def _fold(weight: Tensor, bias: Tensor | None, norm: Norm | None, columns: slice) -> tuple[Tensor, Tensor | None]:
    """W·diag(γ), and W·β in the bias; `own` are the dimensions of the tokens that are normed."""
    if norm is None:
        return weight, bias
    wide, bias = torch.promote_types(weight.dtype, torch.float32), None if bias is None else _wide(bias)
    if norm.shift is not None:
        shifted = (weight[..., columns].double() @ norm.shift.double()).to(wide)
        bias = shifted if bias is None else bias + shifted
    folded = weight.to(wide, copy=True)
    folded[..., columns].mul_(norm.gain.to(wide))  # in place: fresh memory costs more than sums
    return folded, bias


def _sized(tensor: Tensor) -> str:
    """What a repr says of a tensor."""
    return f"{' × '.join(map(str, tensor.shape[-2:]))} {str(tensor.dtype).removeprefix('torch.')}"


def _wide(tensor: Tensor) -> Tensor:
    """Products of weights and gains must not be rounded to half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
