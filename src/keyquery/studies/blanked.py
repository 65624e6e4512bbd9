"""Blanks in text that nobody has learned from, and how far down the list a filler has the word that stood there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.data import windows
from keyquery.forms.counts import normed_rows
from keyquery.instruments.words import Cooccurrence
from keyquery.layers import CooccurrenceAttention
from keyquery.studies.texts import HELD_OUT
from keyquery.training import Recipe, train

REACH, COUNT = 8, 1000  # words on either side of a blank, and blanks a seed
HEADS, RANK = 4, 32  # of layers of counts
FEW = 1e-9  # of a score, so that words that score alike go by how frequent they are


@dataclass(frozen=True, eq=False)
class Blanks:
    """Windows of held-out text, whose middle word is asked for."""

    texts: Int[Tensor, "count n"]

    @classmethod
    def of(cls, folder: Path, seed: int) -> Blanks:
        """Those of a seed: of the last half of what is held out, which chooses nothing."""
        ids = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int64))
        kept = int(len(ids) * (1 - HELD_OUT))
        last = ids[kept + (len(ids) - kept) // 2 :]
        return cls(windows(last, COUNT, 2 * REACH + 1, torch.Generator().manual_seed(1000 + seed)))

    @property
    def truth(self) -> Int[Tensor, " count"]:
        """What stood in the blank."""
        return self.texts[:, REACH]

    @property
    def before(self) -> Int[Tensor, "count reach"]:
        """Words to the left."""
        return self.texts[:, :REACH]

    @property
    def after(self) -> Int[Tensor, "count reach"]:
        """Words to the right."""
        return self.texts[:, REACH + 1 :]

    @property
    def context(self) -> Int[Tensor, "count words"]:
        """Words on both sides."""
        return torch.cat((self.before, self.after), 1)


def told_ranks(scores: Float[Tensor, "count words"], truth: Int[Tensor, " count"]) -> dict[str, float]:
    """Of the words that were there: median rank from 1, ties in the middle; mean of 1/rank; share among the first ten.

    >>> told_ranks(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([2]))
    {'median': 2.0, 'reciprocal': 0.5, 'ten': 1.0}
    """
    own = scores.gather(1, truth[:, None])
    ranks = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return {
        "median": float(ranks.median()),
        "reciprocal": float((1 / ranks).mean()),
        "ten": float((ranks <= 10).float().mean()),
    }


def counting(counts: Cooccurrence, blanks: Blanks) -> dict[str, Float[Tensor, "count words"]]:
    """Scores of every word for every blank, by ways to count.

    - unigram: how frequent a word is, whatever stands around it
    - published: e of the projection, with counts of what stands near; normed: the same with Norm(M)
    - ppmi: PPMI in place of counts, each word of the context weighed by attention, Norm(M); equal: all weighed alike
    - near: naive Bayes, log p(word) + Σ log p(context word | word), counts of one more; directed: of context words
      before, and of those after
    """
    near = counts.symmetric()
    raw, ppmi = near.dense().float(), near.dense("ppmi").float()
    frequency = torch.from_numpy(counts.frequency).float()
    found = {
        "unigram": frequency.expand(len(blanks.truth), -1),
        "published": _projected(raw, blanks.context, normed=False),
        "normed": _projected(raw, blanks.context, normed=True),
        "ppmi": _projected(ppmi, blanks.context, normed=True),
        "equal": ppmi[blanks.context].mean(1),
        "near": _bayes(near, blanks),
        "directed": _bayes(counts, blanks),
    }
    tie = FEW * frequency / frequency.max()
    return {name: scores if name == "unigram" else scores + tie * scores.abs().max() for name, scores in found.items()}


def _projected(s: Float[Tensor, "n n"], context: Int[Tensor, "count r"], normed: bool) -> Float[Tensor, "count n"]:
    """The e of each row's projection: mean over r of M_r (QS)."""
    m = s[context[:, :, None], context[:, None, :]]
    weights = (normed_rows(m) if normed else m).mean(1)
    return torch.stack([weight @ s[words] for weight, words in zip(weights, context, strict=True)])


def _bayes(counts: Cooccurrence, blanks: Blanks) -> Float[Tensor, "count n"]:
    x = counts.dense().float() + 1
    given = (
        (x / x.sum(0)).log(),
        (x / x.sum(1, keepdim=True)).log().mT,
    )  # rows: context word before, after; columns: word
    frequency = torch.from_numpy(counts.frequency).float() + 1
    found = given[0][blanks.before].sum(1) + given[1][blanks.after].sum(1)
    return found + (frequency / frequency.sum()).log()


class Filler(nn.Module):
    """A layer of counts that learns to fill blanks: the sum of its rows, times a gain, plus how frequent a word is."""

    def __init__(self, counts: Cooccurrence, fresh: bool) -> None:
        super().__init__()
        self.layer = CooccurrenceAttention(counts, HEADS, RANK, kind="ppmi", values="ppmi")
        if fresh:
            for part in (self.layer.query, self.layer.key, self.layer.value, self.layer.output):
                assert part is not None
                part.reset_parameters()
        self.gain = nn.Parameter(torch.ones(()))
        frequency = torch.from_numpy(counts.frequency).float() + 1
        self.bias = nn.Parameter((frequency / frequency.sum()).log())

    def forward(self, context: Int[Tensor, "count words"]) -> Float[Tensor, "count n"]:
        """Logits of the word in each blank."""
        return self.gain * self.layer(context).sum(1) + self.bias


def learned(counts: Cooccurrence, ids: Int[Tensor, " tokens"], fresh: bool, steps: int, seed: int) -> Filler:
    """A filler after so many steps on text, from counts or `fresh`, from weights at random."""
    torch.manual_seed(seed)
    model = Filler(counts, fresh)

    def draw(step: int, generator: torch.Generator) -> Blanks:
        return Blanks(windows(ids, 64, 2 * REACH + 1, generator))

    def loss(model: nn.Module, blanks: Blanks) -> Tensor:
        return cross_entropy(model(blanks.context), blanks.truth)

    train(model, draw, loss, Recipe(steps, lr=2e-3, warmup=min(20, steps // 4), seed=seed, weight_decay=0.0))
    return model
