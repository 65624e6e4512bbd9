"""A path taken out: the attention of a head with one source removed from its queries or its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keyquery.instruments.attribution.table import HeadScores
from keyquery.listening.residual.terms import BIAS
from keyquery.support.checks import check_choice


def removed(
    scores: HeadScores, softcap: float | None, source: str, side: str, pairs: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Attention of pairs as it is, without a source on one side, and without a random write of its size instead."""
    check_choice("side", side, ("query", "key"))
    if source not in scores.names:
        heads = next((name for name in reversed(scores.names) if "." in name), scores.names[0])
        raise ValueError(f"without must name a source of this head, such as {heads!r}, got {source!r}")
    write = scores.values[scores.names.index(source)]
    noise = torch.randn(write.shape, generator=torch.Generator().manual_seed(0)).to(write)
    noise = noise * write.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    maps = {
        "weight": scores.weights(softcap),
        "without": scores.weights(softcap, scores.without(write, side, float(source == BIAS))),
        "random": scores.weights(softcap, scores.without(noise, side)),
    }
    rows = [{"query": i, "key": j, **{name: float(each[i, j]) for name, each in maps.items()}} for i, j in pairs]
    return {"source": source, "side": side, "pairs": rows}
