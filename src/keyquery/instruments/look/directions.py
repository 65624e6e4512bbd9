"""Directions of a head described by tokens: eigenvectors of S and rotation planes of A, by the nearest embeddings."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.forms import Form

TOKENS = 5  # shown on each side
CANDIDATES = 40  # tokens farthest out in a plane, searched for pairs


class Directions:
    """Token embeddings, centred and of unit norm, to compare so many directions of each head with."""

    def __init__(self, embedding: Float[Tensor, "vocabulary d"], words: list[str] | None, count: int) -> None:
        self._count = count
        centred = embedding.float() - embedding.float().mean(0)
        self._rows = centred / torch.linalg.vector_norm(centred, dim=1, keepdim=True).clamp(min=1e-12)
        self._words = words
        if words is not None:  # leave out partial characters and control characters
            printable = torch.tensor([word.isprintable() and not word.startswith("<0x") for word in words])
            printable = torch.nn.functional.pad(printable, (0, max(len(self._rows) - len(printable), 0)), value=True)
            self._rows[~printable[: len(self._rows)].to(self._rows.device)] = 0.0

    @property
    def width(self) -> int:
        """Width of the embeddings; heads of another width cannot be compared."""
        return self._rows.shape[1]

    def of(self, form: Form) -> list[dict[str, Any]]:
        """The leading eigenvectors of S and planes of A of every head, with their tokens."""
        flat = Form(*(t.reshape(-1, form.rank, form.dim) for t in torch.broadcast_tensors(form.query, form.key)))
        rank = min(2 * form.rank, form.dim)
        values, vectors = flat.eigh(min(self._count, rank))
        planes = flat.skew_planes(min(self._count, rank // 2))
        heads = []
        for head in range(len(flat)):
            strongest = values[head].abs().argsort(descending=True)
            objects = [self._object(values[head, i], vectors[head, :, i]) for i in strongest]
            relations = [
                self._relation(planes.values[head, i], planes.source[head, :, i], planes.target[head, :, i])
                for i in range(planes.values.shape[-1])
            ]
            heads.append({"objects": objects, "relations": relations})
        return heads

    def _object(self, value: Tensor, vector: Tensor) -> dict[str, Any]:
        """Tokens at both ends of an eigenvector of S."""
        along = self._rows @ vector.to(self._rows)
        count = min(TOKENS, len(along))
        ends = {"tokens": along.topk(count).indices, "opposite": (-along).topk(count).indices}
        return {"value": value.item(), **{end: self._texts(indices) for end, indices in ends.items()}}

    def _relation(self, value: Tensor, source: Tensor, target: Tensor) -> dict[str, Any]:
        """Token pairs with the highest scores in a rotation plane of A: query token → key token.

        In coordinates (a, b) of the plane the score is value·(aᵢbⱼ − bᵢaⱼ), for any rotation of the plane's axes.
        """
        a, b = self._rows @ source.to(self._rows), self._rows @ target.to(self._rows)
        far = (a.square() + b.square()).topk(min(CANDIDATES, len(a))).indices
        strength = a[far, None] * b[far] - b[far, None] * a[far]
        best = strength.flatten().topk(min(TOKENS, strength.numel())).indices
        pairs = [(far[index // len(far)], far[index % len(far)]) for index in best]
        return {"value": value.item(), "pairs": [self._texts(torch.stack(pair)) for pair in pairs]}

    def _texts(self, indices: Tensor) -> list[str]:
        known = self._words or []
        return [known[i] if i < len(known) else f"#{i}" for i in indices.tolist()]
