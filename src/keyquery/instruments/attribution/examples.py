"""Pairs of tokens at which one source adds most to the score of a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Layer
from keyquery.listening.residual.kernels import Kernel, centred
from keyquery.listening.residual.recording import Recording
from keyquery.listening.residual.terms import HeadWrites, Mapped, Sum, Term, Write, carried

PAIRS = 3  # of one cell


def examples(
    record: Recording, layers: Sequence[Layer], cells: Mapping[int, Mapping[str, Sequence[str]]]
) -> list[dict[str, Any]]:
    """Of each head and side, for each of some sources: the pairs to which it adds most, relative to the other keys."""
    entered = record.of(layers[0])
    assert entered.term is not None
    writes = _by_source(entered.term)
    out = []
    for head, sides in cells.items():
        kernels = [Kernel.of(layer, entered.tokens.float(), record.pairs[layer.index], head) for layer in layers]
        for side, sources in sides.items():
            for source in sources:
                if source in writes:
                    added = _added(kernels, entered.term, writes[source], entered.tokens.float(), side)
                    visible = record.pairs[layers[0].index].visible
                    seen = visible[:, head if visible.shape[1] > 1 else 0].expand_as(added)
                    out.append({"head": head, "side": side, "source": source, "pairs": _largest(added, seen)})
    return out


def _by_source(term: Term) -> dict[str, list[tuple[Write | HeadWrites, Tensor]]]:
    """Every write of an expression with its values, by source."""
    out: dict[str, list[tuple[Write | HeadWrites, Tensor]]] = {}
    for leaf in dict.fromkeys(_leaves(term)):
        for name, value in leaf.parts().items():
            out.setdefault(name, []).append((leaf, value))
    return out


def _leaves(term: Term) -> list[Write | HeadWrites]:
    if isinstance(term, Mapped):
        return _leaves(term.term)
    return [leaf for part in term.terms for leaf in _leaves(part)] if isinstance(term, Sum) else [term]


def _added(
    kernels: Sequence[Kernel], term: Term, writes: Sequence[tuple[Any, Tensor]], tokens: Tensor, side: str
) -> Float[Tensor, "batch n n"]:
    """What a source adds to every score through the queries, or through the keys."""
    through = [carried(term, leaf, value) for leaf, value in writes]
    source = torch.stack([part.broadcast_to(tokens.shape).float() for part in through if part is not None]).sum(0)[None]
    total = torch.zeros(())
    for kernel in kernels:
        parts = [source if side == "query" else tokens[None], source if side == "key" else tokens[None]]
        zero, one = torch.zeros(1), torch.ones(1)
        query = kernel.queries(parts[0], zero if side == "query" else one)[0, :, 0]
        key = kernel.keys(parts[1], zero if side == "key" else one)[0, :, 0]
        total = total + query @ key.mT
    return total


def _largest(added: Float[Tensor, "batch n n"], seen: Tensor) -> list[dict[str, Any]]:
    relative = centred(added, seen).masked_fill(~seen, -torch.inf)
    order = relative.flatten().argsort(descending=True)[:PAIRS].tolist()
    n = added.shape[-1]
    pairs = [(index // n**2, index // n % n, index % n) for index in order]
    return [{"sequence": b, "query": i, "key": j, "relative": float(relative[b, i, j])} for b, i, j in pairs]
