"""How much of a head is co-occurrence: its scores between tokens, beside what a corpus says of the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.capture.load import load_tokenizer
from keyquery.checkpoints import Layer
from keyquery.forms.counts import KINDS
from keyquery.instruments.cooccurrence.cooccurrence import Cooccurrence
from keyquery.support.progress import Progress

TOKENS = 400  # the most frequent, whose pairs are compared
DRAWS = 99  # of the corpus with its tokens changed among each other
HEADS = 39  # drawn at random, on the same embeddings
BAND = 20  # tokens of like frequency, among which they are changed
FEWEST = 20  # tokens, below which a correlation says nothing
LEVEL = 0.95
ROUNDING = 1e-9  # of the energy of scores: a part that small is none
NAMES = ("symmetric_cosine", "skew_cosine", "explained")


class Corpus:
    """PPMI of a corpus between its most frequent tokens: its symmetric and its skew part, centred, of unit length.

    Two controls. `chance`: the corpus with tokens of like frequency changed among each other, which is what the
    frequency of tokens alone would give. `random`: heads whose weights are drawn at random, on the same embeddings,
    which is what embeddings alone would give, for these have learned what stands near what.
    """

    def __init__(self, counts: Cooccurrence, embedding: Float[Tensor, "vocabulary d"], name: str | None = None) -> None:
        known = min(len(counts), len(embedding))
        order = np.argsort(-counts.frequency[:known], kind="stable")[:TOKENS]
        self._places = order[counts.frequency[order] > 0]
        if len(self._places) < FEWEST:
            found = len(self._places)
            raise ValueError(f"the corpus must hold at least {FEWEST} different tokens of the model, got {found}")
        self._rows = embedding[torch.from_numpy(self._places)].float()
        chosen = counts.only(self._places)
        ppmi = centred(chosen.dense("ppmi"))
        draws = _draws(len(ppmi))
        self._symmetric, self._skew = (_upper(part[draws[:, :, None], draws[:, None, :]]) for part in halves(ppmi))
        for parts in (self._symmetric, self._skew):
            parts /= parts.norm(dim=1, keepdim=True).clamp(min=1e-12)
        self.facts: dict[str, Any] = {
            "from": name,
            "tokens": counts.tokens,
            "window": counts.window,
            "compared": len(self._places),
            "draws": DRAWS,
            "symmetry": {kind: chosen.symmetry(kind) for kind in KINDS},
        }

    @property
    def width(self) -> int:
        """The embeddings' width: heads of another cannot be held against them."""
        return self._rows.shape[1]

    def of(self, layer: Layer) -> list[dict[str, float]]:
        """Each head's figures, as `beside` says, of scores between the tokens' embeddings, normed as the layer does.

        That is what the layer would do with the tokens alone, in no context and at no distance.
        """
        rows = self._rows if layer.norm is None else layer.norm(self._rows)
        query, key = layer.project(rows)
        found = self.beside((query.float() @ key.float().mT).flatten(0, 1))
        drawn = self.beside(_random_scores(rows.float(), layer.weights.query.shape[-2]))
        controls = {f"{name}_random": _chance(torch.tensor([one[name] for one in drawn])) for name in NAMES}
        return [{**figures, **controls} for figures in found]

    def beside(self, scores: Float[Tensor, "heads n n"]) -> list[dict[str, float]]:
        """How alike scores (heads, n, n) are to the corpus, rows and columns centred, without a token's own pair.

        `symmetric_cosine` is the cosine of their symmetric parts, `skew_cosine` that of their skew parts: above 0 where
        queries look at what comes after them in the corpus, below 0 at what comes before; `explained`, how much of the
        scores both parts of the corpus account for, scaled as suits best. `…_chance` is what 95 of 100 draws stay
        below, signs aside.
        """
        symmetric, skew = (_upper(part) for part in halves(centred(scores)))
        sizes = symmetric.square().sum(1), skew.square().sum(1)
        total = (sizes[0] + sizes[1]).clamp(min=1e-30)
        found = []
        for part, corpus, size in ((symmetric, self._symmetric, sizes[0]), (skew, self._skew, sizes[1])):
            alike = part @ corpus.mT / size.sqrt().clamp(min=1e-30)[:, None]
            found.append(torch.where((size > ROUNDING * total)[:, None], alike, 0.0))
        both = sum(alike.square() * size[:, None] for alike, size in zip(found, sizes, strict=True)) / total[:, None]
        return [
            {
                key: value
                for name, alike in zip(NAMES, (*found, both), strict=True)
                for key, value in ((name, float(alike[head, 0])), (f"{name}_chance", _chance(alike[head, 1:])))
            }
            for head in range(len(scores))
        ]


def corpus_of(
    source: str | Path | Cooccurrence,
    embedding: Float[Tensor, "vocabulary d"] | None,
    tokenizer: Any,
    window: int,
    progress: Progress,
) -> Corpus:
    """What heads are held against: a text file by the tokens of the model, or counts of these tokens.

    `tokenizer` may be the path of a model, beside which it lies.
    """
    if isinstance(tokenizer, str) and not isinstance(source, Cooccurrence):
        tokenizer = load_tokenizer(tokenizer)
    if embedding is None:
        raise ValueError("corpus needs the embeddings of tokens, and the checkpoint has none that are known")
    if isinstance(source, Cooccurrence):
        return Corpus(source, embedding)
    if tokenizer is None:
        raise ValueError("corpus needs a tokenizer: none lies beside the model, and none was given")
    counts = Cooccurrence.from_text(Path(source), window, tokenizer=tokenizer, progress=progress)
    return Corpus(counts, embedding, Path(source).name)


def centred(scores: Float[Tensor, "*heads n n"]) -> Float[Tensor, "*heads n n"]:
    """Without the means of rows and of columns: what softmax does not see, and what follows the crowd.

    >>> centred(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[0., 0.],
            [0., 0.]])
    """
    rows = scores - scores.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def halves(scores: Float[Tensor, "*heads n n"]) -> tuple[Tensor, Tensor]:
    """(M + Mᵀ)/2 and (M − Mᵀ)/2."""
    return (scores + scores.mT) / 2, (scores - scores.mT) / 2


def _upper(parts: Float[Tensor, "some n n"]) -> Float[Tensor, "some pairs"]:
    rows, columns = torch.triu_indices(parts.shape[-1], parts.shape[-1], offset=1)
    return parts[:, rows, columns].float()


def _draws(count: int) -> Int[Tensor, "draws n"]:
    """Tokens as they are, then changed within bands of like frequency, again and again."""
    generator = torch.Generator().manual_seed(0)
    bands = torch.arange(count).split(BAND)
    drawn = [torch.cat([band[torch.randperm(len(band), generator=generator)] for band in bands]) for _ in range(DRAWS)]
    return torch.stack([torch.arange(count), *drawn])


def _random_scores(rows: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "heads n n"]:
    """Scores of heads whose queries and keys are drawn at random."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, HEADS, rank, rows.shape[1], generator=generator).to(rows.device)
    return (rows @ query.mT) @ (rows @ key.mT).mT


def _chance(alike: Float[Tensor, " draws"]) -> float:
    return float(alike.abs().sort().values[int(np.ceil(LEVEL * len(alike))) - 1])


def level(figures: Mapping[str, Any], name: str) -> float:
    """What a figure must exceed to say anything: the higher of its two controls.

    >>> level({"skew_cosine": -0.2, "skew_cosine_chance": 0.01, "skew_cosine_random": 0.1}, "skew_cosine")
    0.1
    """
    return max(figures[f"{name}_chance"], figures[f"{name}_random"])
