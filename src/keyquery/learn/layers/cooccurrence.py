"""Attention initialised from co-occurrence counts X: queries and keys from log X, values from X."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import one_hot

from keyquery.layers.attention import Attention
from keyquery.learn.cooccurrence.cooccurrence import KINDS, dealt
from keyquery.support.checks import check_choice


class CooccurrenceAttention(Attention):
    """`kq.Attention` over a vocabulary, initialised from co-occurrence counts X.

    Scores are log(X + smooth) or PPMI, and values are rows of X. With Q the one-hot rows of the tokens, one head of
    full rank attends by row-normalised co-occurrence, exactly (X + smooth for X):

        softmax(Q log(X) Qᵀ) = Norm(QXQᵀ),   output Norm(QXQᵀ) QX

    Several heads share the truncated SVD of the matrix: their forms sum to its best approximation of rank heads·r. The
    input is token ids (batch, n) or vectors (batch, n, vocabulary).

    Parameters
    ----------
    cooc
        A `kq.Cooccurrence`.
    heads
        Default: 1.
    rank
        Rank r per head. Default: vocabulary size / heads.
    kind, values
        Matrix of the scores and of the values: "counts", "log" or "ppmi". Default: "log" and "counts".
    smooth
        Added to the counts before the logarithm. Default: 1.
    frozen
        Do not train the weights. Default: False.
    dropout, device, dtype
        As in `kq.Attention`.

    Examples
    --------
    >>> counts = kq.Cooccurrence.from_text("a rose is a rose is a rose", window=2)
    >>> layer = kq.CooccurrenceAttention(counts, heads=1, rank=3, smooth=1e-9, dtype=torch.float64)
    >>> words = counts.numbers("rose is a")
    >>> shares = torch.tensor(counts.project(words).norm, dtype=torch.float64)
    >>> bool((layer.maps(words[None])[0, 0] - shares).abs().max() < 1e-6)
    True
    >>> layer(words[None]).shape
    torch.Size([1, 3, 3])
    """

    def __init__(
        self,
        cooc: Any,
        heads: int = 1,
        rank: int | None = None,
        kind: str = "log",
        values: str = "counts",
        smooth: float = 1.0,
        frozen: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if not hasattr(cooc, "vocabulary"):
            raise TypeError(f"cooc must be a kq.Cooccurrence, got {type(cooc).__name__}")
        check_choice("values", values, KINDS)
        if kind == "log" and not 0 < smooth < float("inf"):
            raise ValueError(f"smooth must be above 0, since log 0 = −∞ is not a finite score, got {smooth}")
        scores = dealt(cooc.dense(kind, smooth), heads, rank)
        same = values == kind and (kind != "log" or smooth == 1)
        carried = scores if same else dealt(cooc.dense(values), heads, rank)
        size, width = len(cooc.vocabulary), scores.query.shape[-2]
        super().__init__(size, heads, bias=False, dropout=dropout, head_dim=width, device=device, dtype=dtype)
        assert self.query is not None
        with torch.no_grad():
            for part, factor in ((self.query, scores.query), (self.key, scores.key)):
                part.weight.copy_(factor.flatten(0, 1) * self.scale**-0.5)  # cancels the score scale
            self.value.weight.copy_(carried.query.flatten(0, 1))
            self.output.weight.copy_(carried.key.flatten(0, 1).mT)
        self.requires_grad_(not frozen)

    def forward(self, x: Shaped[Tensor, "..."], *arguments: Any, **options: Any) -> Float[Tensor, "*batch n words"]:
        """Attend within each sequence of token ids (batch, n) or vectors; arguments as in `kq.Attention`."""
        return super().forward(self.select(x), *arguments, **options)

    def maps(self, x: Shaped[Tensor, "..."], *arguments: Any, **options: Any) -> Float[Tensor, "batch heads n n"]:
        """Attention weights on token ids (batch, n) or vectors, as `kq.Attention.maps`.

        >>> layer = kq.CooccurrenceAttention(kq.Cooccurrence(torch.ones(3, 3)))
        >>> layer.maps(torch.tensor([[0, 1]])).shape
        torch.Size([1, 1, 2, 2])
        """
        return super().maps(self.select(x), *arguments, **options)

    def select(self, words: Shaped[Tensor, "..."]) -> Float[Tensor, "*batch n words"]:
        """One-hot rows Q of token ids; vectors are returned unchanged.

        >>> kq.CooccurrenceAttention(kq.Cooccurrence(torch.ones(3, 3))).select(torch.tensor([[2]]))
        tensor([[[0., 0., 1.]]])
        """
        if words.is_floating_point():
            return words
        if words.numel() and not (int(words.min()) >= 0 and int(words.max()) < self.dim):
            wrong = int(words.min()) if int(words.min()) < 0 else int(words.max())
            raise ValueError(f"token ids must be from 0 to {self.dim - 1}, the vocabulary, got {wrong}")
        return one_hot(words.long(), self.dim).to(self.key.weight.dtype)
