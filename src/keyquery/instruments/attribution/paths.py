"""Depth 2: what a head wrote into a token, by the tokens that it attended to and what stood there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.instruments.attribution.table import HeadScores
from keyquery.listening.residual.recording import Recording
from keyquery.listening.residual.terms import HeadWrites, parts, pulled

SOURCES = 3  # heads that are unfolded on each side
POSITIONS = 3  # tokens that are listed of each
ORIGINS = 3  # sources that are listed of each token


def unfolded(
    record: Recording, scores: HeadScores, pair: tuple[int, int], relative: Float[Tensor, "s s"]
) -> list[dict[str, Any]]:
    """The heads of largest relative score on each side, along their attention, in raw contributions; largest first."""
    out = []
    for side, dim in (("query", 1), ("key", 0)):
        sums = dict(zip(scores.sources, relative.sum(dim).tolist(), strict=True))
        functionals = _functionals(record, scores, pair, side)
        heads = [name for name in sums if name.rpartition(".")[0] in functionals]
        for name in sorted(heads, key=lambda name: -abs(sums[name]))[:SOURCES]:
            path = _unfold(record, pair[side == "key"], name, *functionals[name.rpartition(".")[0]])
            out.append({"side": side, "source": name, **path, "relative": sums[name]})
    return sorted(out, key=lambda path: -abs(path["relative"]))


def _functionals(
    record: Recording, scores: HeadScores, pair: tuple[int, int], side: str
) -> dict[str, tuple[HeadWrites, Float[Tensor, " d"]]]:
    """For every attention layer that writes into the query (or key) token: u with u·write = its part of the score."""
    token = pair[side == "key"]
    other = (scores.keys if side == "query" else scores.queries).sum(0)[pair[side == "query"]]
    gradient = other.new_zeros(len(scores.visible), len(other))
    gradient[token] = other
    term = record.of(scores.layer).term
    assert term is not None
    return {
        write.label: (write, back[0].reshape(-1, back.shape[-1])[token])
        for write, back in pulled(term, scores.pulled(side, gradient)[None])
        if isinstance(write, HeadWrites) and write.label in record.attended
    }


def _unfold(
    record: Recording, token: int, name: str, write: HeadWrites, functional: Float[Tensor, " d"]
) -> dict[str, Any]:
    """What a head wrote into a token, and the tokens that it moved it from."""
    head, attended = int(name.rpartition(".")[2]), record.attended[write.label]
    weight = write.weight.unflatten(-1, (write.heads, -1))[:, head].float()
    context = write.context.reshape(-1, write.context.shape[-1])[token].unflatten(-1, (write.heads, -1))[head]
    read = weight.mT @ functional.float()  # the score of a value vector of this head
    pattern = attended.weights.reshape(write.heads, *attended.weights.shape[-2:])[head, token].float()
    whole = float(read @ context.float())
    steps = [] if attended.term is None else _steps(parts(attended.term), read, pattern, head, write.heads)
    return {"contribution": whole, "steps": steps, "rest": whole - sum(step["contribution"] for step in steps)}


def _steps(
    values: Mapping[str, Tensor], read: Float[Tensor, " r"], pattern: Float[Tensor, " n"], head: int, heads: int
) -> list[dict[str, Any]]:
    """The tokens that a head moved most from, with the sources that its values there consist of."""
    moved = [_of_head(value, head, heads, len(pattern))[:, : len(read)] for value in values.values()]
    table = pattern * (torch.stack(moved) @ read)  # sources by tokens
    names, steps = list(values), []
    for position in table.sum(0).abs().argsort(descending=True)[:POSITIONS].tolist():
        column = table[:, position]
        largest = column.abs().argsort(descending=True)[:ORIGINS].tolist()
        origins = [{"source": names[index], "contribution": float(column[index])} for index in largest]
        step = {"position": position, "weight": float(pattern[position]), "contribution": float(column.sum())}
        rest = step["contribution"] - sum(float(column[index]) for index in largest)
        steps.append({**step, "origins": origins, "rest": rest})
    return steps


def _of_head(value: Tensor, head: int, heads: int, tokens: int) -> Float[Tensor, "n r"]:
    """The values of one query head, also where several share them."""
    by_head = value.reshape(-1, tokens, value.shape[-1])
    return by_head[head * len(by_head) // heads].float()
