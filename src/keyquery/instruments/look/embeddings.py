"""What token embeddings tell of a head: its directions by their tokens, and its scores beside a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Form

SHOWN_TOKENS = 5  # tokens shown on each side of a direction
CANDIDATES = 40  # tokens farthest out in a plane, searched for pairs
TOKENS = 400  # most frequent tokens, whose pairs are compared
DRAWS = 99  # random permutations of the corpus tokens
HEADS = 39  # random heads on the same embeddings
BAND = 20  # tokens of similar frequency, permuted among each other
MIN_TOKENS = 20  # fewer tokens give no meaningful correlation
LEVEL = 0.95
ROUNDING = 1e-9  # relative to the energy of the scores: a smaller part counts as 0
NAMES = ("symmetric_cosine", "skew_cosine", "explained")


class Directions:
    """Token embeddings, centred and of unit norm, to compare so many directions of each head with."""

    def __init__(self, embedding: Float[Tensor, "vocabulary d"], words: list[str] | None, count: int) -> None:
        shifted = embedding.float() - embedding.float().mean(0)
        self._rows = shifted / torch.linalg.vector_norm(shifted, dim=1, keepdim=True).clamp(min=1e-12)
        size, self.width = embedding.shape
        self._words, self._count = [*(words or ())][:size], count
        self._words += [f"#{number}" for number in range(len(self._words), size)]
        partial = [word.startswith("<0x") or not word.isprintable() for word in self._words]
        self._rows[torch.tensor(partial, device=self._rows.device)] = 0.0  # parts of characters, control characters

    def of(self, form: Form) -> list[dict[str, Any]]:
        """The leading eigenvectors of S and planes of A of every head, with their tokens."""
        flat = Form(*(t.reshape(-1, form.rank, form.dim) for t in torch.broadcast_tensors(form.query, form.key)))
        rank = min(2 * form.rank, form.dim)
        values, vectors = flat.eigh(min(self._count, rank))
        planes = flat.skew_planes(min(self._count, rank // 2))
        heads = []
        for head in range(len(flat)):
            strongest = values[head].abs().argsort(descending=True)
            objects = map(self._object, values[head, strongest], vectors[head].mT[strongest])
            relations = map(self._relation, planes.values[head], planes.source[head].mT, planes.target[head].mT)
            heads.append({"objects": list(objects), "relations": list(relations)})
        return heads

    def _object(self, value: Tensor, vector: Tensor) -> dict[str, Any]:
        """Tokens at both ends of an eigenvector of S."""
        along = self._rows @ vector.to(self._rows)
        count = min(SHOWN_TOKENS, len(along))
        ends = {"tokens": along.topk(count).indices, "opposite": (-along).topk(count).indices}
        return {"value": value.item(), **{end: self._texts(numbers) for end, numbers in ends.items()}}

    def _relation(self, value: Tensor, source: Tensor, target: Tensor) -> dict[str, Any]:
        """Token pairs, query → key, with the highest scores in a rotation plane of A: value·(aᵢbⱼ − bᵢaⱼ)."""
        a, b = self._rows @ source.to(self._rows), self._rows @ target.to(self._rows)
        far = (a.square() + b.square()).topk(min(CANDIDATES, len(a))).indices
        strength = a[far, None] * b[far] - b[far, None] * a[far]
        best = strength.flatten().topk(min(SHOWN_TOKENS, strength.numel())).indices
        pairs = torch.stack((far[best // len(far)], far[best % len(far)]), 1)
        return {"value": value.item(), "pairs": [self._texts(pair) for pair in pairs]}

    def _texts(self, numbers: Tensor) -> list[str]:
        return [self._words[number] for number in numbers.tolist()]


class Corpus:
    """PPMI between the most frequent tokens of a corpus: symmetric and skew parts, centred, of unit norm.

    Two null levels keep what token frequency alone explains (`chance`: tokens of similar frequency are permuted), and
    what the embeddings alone explain (`random`: heads of random weights on them), which have learned co-occurrence.
    """

    def __init__(self, counts: Any, embedding: Float[Tensor, "vocabulary d"]) -> None:
        known = min(len(counts), len(embedding))
        order = np.argsort(-counts.frequency[:known], kind="stable")[:TOKENS]
        frequent = order[counts.frequency[order] > 0]
        if (count := len(frequent)) < MIN_TOKENS:
            raise ValueError(f"the corpus must hold at least {MIN_TOKENS} different tokens of the model, got {count}")
        self._rows, self.width = embedding[torch.from_numpy(frequent)].float(), embedding.shape[1]
        chosen = counts.only(frequent)
        ppmi = centred(chosen.dense("ppmi"))
        draws = _draws(len(ppmi))
        self._symmetric, self._skew = (_upper(part[draws[:, :, None], draws[:, None, :]]) for part in halves(ppmi))
        for parts in (self._symmetric, self._skew):
            parts /= parts.norm(dim=1, keepdim=True).clamp(min=1e-12)
        self.facts: dict[str, Any] = {
            "from": None,
            "tokens": counts.tokens,
            "window": counts.window,
            "compared": count,
            "draws": DRAWS,
            "symmetry": {kind: chosen.symmetry(kind) for kind in ("counts", "log", "ppmi")},
        }

    def of(self, layer: Layer) -> list[dict[str, float]]:
        """Metrics per head, as in `beside`, of its scores between single tokens, without context and at offset 0."""
        rows = self._rows if layer.norm is None else layer.norm(self._rows)
        query, key = layer.project(rows)
        rows_of_heads = self.beside((query.float() @ key.float().mT).flatten(0, 1))
        of_random_heads = self.beside(_random_scores(rows.float(), layer.weights.query.shape[-2]))
        controls = {f"{name}_random": _chance(torch.tensor([row[name] for row in of_random_heads])) for name in NAMES}
        return [{**metrics, **controls} for metrics in rows_of_heads]

    def beside(self, scores: Float[Tensor, "heads n n"]) -> list[dict[str, float]]:
        """Cosines of centred scores with the corpus by part, the share that both explain, and their null levels."""
        symmetric, skew = (_upper(part) for part in halves(centred(scores)))
        sizes = symmetric.square().sum(1), skew.square().sum(1)
        total = (sizes[0] + sizes[1]).clamp(min=1e-30)
        cosines = []
        for part, corpus, size in ((symmetric, self._symmetric, sizes[0]), (skew, self._skew, sizes[1])):
            cos = part @ corpus.mT / size.sqrt().clamp(min=1e-30)[:, None]
            cosines.append(torch.where((size > ROUNDING * total)[:, None], cos, 0.0))
        both = sum(cos.square() * size[:, None] for cos, size in zip(cosines, sizes, strict=True)) / total[:, None]
        by_name = dict(zip(NAMES, (*cosines, both), strict=True))
        return [
            {name: float(values[head, 0]) for name, values in by_name.items()}
            | {f"{name}_chance": _chance(values[head, 1:]) for name, values in by_name.items()}
            for head in range(len(scores))
        ]


def check_corpus(counts: Any, heads: Heads) -> None:
    """Require counts, if any, that heads can be compared with: all that `kq.Cooccurrence` has and heads need."""
    if counts is not None and not hasattr(counts, "only"):
        hint = "kq.Cooccurrence.from_text(path, tokenizer=…) counts a text"
        raise TypeError(f"corpus must be a kq.Cooccurrence, got a {type(counts).__name__}; {hint}")
    if counts is not None and heads.embedding_shape is None:
        raise ValueError("corpus needs token embeddings, and none were found in the checkpoint")


def centred(scores: Float[Tensor, "*heads n n"]) -> Float[Tensor, "*heads n n"]:
    """Remove row means (invisible to softmax) and column means (popularity)."""
    rows = scores - scores.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def halves(scores: Float[Tensor, "*heads n n"]) -> tuple[Tensor, Tensor]:
    """(M + Mᵀ)/2 and (M − Mᵀ)/2."""
    return (scores + scores.mT) / 2, (scores - scores.mT) / 2


def _upper(parts: Float[Tensor, "some n n"]) -> Float[Tensor, "some pairs"]:
    rows, columns = torch.triu_indices(parts.shape[-1], parts.shape[-1], offset=1)
    return parts[:, rows, columns].float()


def _draws(count: int) -> Int[Tensor, "draws n"]:
    """The identity, then random permutations within bands of similar frequency."""
    generator = torch.Generator().manual_seed(0)
    bands = torch.arange(count).split(BAND)
    drawn = [torch.cat([band[torch.randperm(len(band), generator=generator)] for band in bands]) for _ in range(DRAWS)]
    return torch.stack([torch.arange(count), *drawn])


def _random_scores(rows: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "heads n n"]:
    """Scores of heads with random query and key weights."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, HEADS, rank, rows.shape[1], generator=generator).to(rows.device)
    return (rows @ query.mT) @ (rows @ key.mT).mT


def _chance(values: Float[Tensor, " draws"]) -> float:
    return float(values.abs().sort().values[int(np.ceil(LEVEL * len(values))) - 1])


def level(metrics: Mapping[str, Any], name: str) -> float:
    """The null level of a metric: the higher of its two controls."""
    return max(metrics[f"{name}_chance"], metrics[f"{name}_random"])
