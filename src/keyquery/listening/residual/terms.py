"""Activations as linear expressions of writes into the residual stream.

A running model's tensor x = Σ_s L_s w_s, where w_s is what source s wrote and L_s is linear: residual additions,
scalings, and norms whose statistics are held at their recorded values. Expressions are evaluated on demand only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

BIAS = "bias"  # the source of everything that is the same for every token
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Write:
    """What one source wrote."""

    source: str
    value: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Its value."""
        return {self.source: self.value}


@dataclass(frozen=True, eq=False)
class HeadWrites:
    """What the heads of an attention layer wrote: z_h W_hᵀ, with W_h their slices of the output projection."""

    label: str  # of the layer
    context: Float[Tensor, "*batch heads_r"]  # the input of the output projection
    weight: Float[Tensor, "d heads_r"]
    heads: int

    def parts(self) -> dict[str, Tensor]:
        """One write per head."""
        contexts, weights = (t.unflatten(-1, (self.heads, -1)) for t in (self.context, self.weight))
        return {f"{self.label}.{h}": contexts[..., h, :] @ weights[:, h].mT for h in range(self.heads)}


@dataclass(frozen=True, eq=False)
class Mapped:
    """A linear map of an expression; `like` is its input, for shape and dtype."""

    term: Term
    map: Linear
    shape: torch.Size
    dtype: torch.dtype

    def transposed(self, gradients: Float[Tensor, "many *out"]) -> Float[Tensor, "many *inside"]:
        """The transposed map of several vectors."""
        zero = torch.zeros(self.shape, dtype=self.dtype, device=gradients.device)
        with torch.enable_grad():
            pull: Any = torch.func.vjp(self.map, zero)[1]
            return torch.stack([pull(gradient)[0] for gradient in gradients.to(self.dtype)])


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of expressions, broadcast to one shape."""

    terms: tuple[Term, ...]
    shape: torch.Size


Term = Write | HeadWrites | Mapped | Sum


def added(terms: list[Any], shape: torch.Size) -> Sum:
    """The sum of terms; sums of the same shape are merged, so that a residual stream is one flat sum."""
    flat: list[Term] = []
    for term in terms:
        flat += term.terms if isinstance(term, Sum) and term.shape == shape else (term,)
    return Sum(tuple(flat), shape)


def parts(term: Term) -> dict[str, Tensor]:
    """The contribution of each source to a tensor; they add up to it."""
    if isinstance(term, Write | HeadWrites):
        return term.parts()
    if isinstance(term, Mapped):
        return {source: term.map(value) for source, value in parts(term.term).items()}
    out: dict[str, Tensor] = {}
    for part in term.terms:
        for source, value in parts(part).items():
            value = value.expand(term.shape)
            out[source] = out[source] + value if source in out else value
    return out


def carried(term: Term, start: Term, value: Tensor) -> Tensor | None:
    """What a change of `start` by a value adds to a tensor; None if it does not depend on `start`."""
    if term is start:
        return value
    if isinstance(term, Mapped):
        inside = carried(term.term, start, value)
        return None if inside is None else term.map(inside)
    if isinstance(term, Sum):
        through = [change for part in term.terms if (change := carried(part, start, value)) is not None]
        return torch.stack([change.expand(term.shape) for change in through]).sum(0) if through else None
    return None


def pulled(
    term: Term, gradients: Float[Tensor, "many *shape"]
) -> Iterator[tuple[Write | HeadWrites, Float[Tensor, "many *write"]]]:
    """Every write with the transposed maps of `gradients`: g·L_s w_s = (L_sᵀg)·w_s."""
    if isinstance(term, Mapped):
        yield from pulled(term.term, term.transposed(gradients))
    elif isinstance(term, Sum):
        for part in term.terms:
            yield from pulled(part, gradients)
    else:
        yield term, gradients
