"""Sequences with a masked first token, and a small Transformer that predicts it: review sentiment, next purchase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.layers import Encoder
from keyquery.learn.data import read_column
from keyquery.learn.training import Recipe, train
from keyquery.support.files import write_all
from keyquery_studies.common.store import array_file, digest_of, npz_bytes
from keyquery_studies.time.event_files import retail_rows, retail_time

PADDING, BLANK, FIRST = 0, 1, 2  # ids; from FIRST on the candidates for the masked token, then all other words
LEARN, CHOOSE, TEST = 0, 1, 2  # the split of a sequence
WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[!?]")
REVIEW, HISTORY = 128, 51  # tokens, including the masked one
FEWEST = 3  # items of a customer
RARE = 5  # minimum number of reviews or customers of a word or item
HELD_OUT = 0.1  # validation share of the training data, and test share of the customers


@dataclass(frozen=True, eq=False)
class Blanks:
    """Sequences whose first token is masked: ids (count, n), targets (count,), splits (count,), and words."""

    ids: Int[np.ndarray, "count n"]
    answers: Int[np.ndarray, " count"]
    parts: Int[np.ndarray, " count"]
    words: Sequence[str]
    choices: int

    def part(self, number: int) -> tuple[Int[Tensor, "some n"], Int[Tensor, " some"]]:
        """Sequences and targets of one split."""
        rows = self.parts == number
        return torch.from_numpy(self.ids[rows].astype(np.int64)), torch.from_numpy(self.answers[rows].astype(np.int64))


def reviews(path: str | Path) -> Blanks:
    """A .tsv file with columns split, label (0 or 1) and text: the mask, then the last 127 words of a review.

    A review says at its end what it thinks. Words of fewer than five reviews that are learned from are all one word.
    """
    splits, labels, texts = (read_column(path, column) for column in ("split", "label", "text"))
    if not set(labels) <= {"0", "1"}:
        raise ValueError(f"{path}: label must be 0 or 1, got {', '.join(sorted(set(labels))[:4])}")
    spoken = [WORD.findall(text.lower().replace("<br />", " "))[1 - REVIEW :] for text in texts]
    learned = np.array(splits) == "train"
    counts = Counter(word for words, known in zip(spoken, learned, strict=True) if known for word in set(words))
    kept = sorted((word for word, count in counts.items() if count >= RARE), key=lambda word: (-counts[word], word))
    words = ["", "…", "negative", "positive", "(rare)", *kept]
    parts = np.where(learned, LEARN, TEST)
    able = np.random.default_rng(0).permutation(np.nonzero(learned)[0])
    parts[able[: round(HELD_OUT * len(able))]] = CHOOSE
    # The choices are no words: "positive" in a review is a word of its own.
    places = {word: place for place, word in enumerate(kept, FIRST + 3)}
    ids = _padded(spoken, places, REVIEW, other=FIRST + 2)
    return Blanks(ids, np.array(labels, np.int32), parts, words, choices=2)


def histories(path: str | Path) -> Blanks:
    """The .csv of Online Retail: the blank, then the fifty distinct items that a customer bought before, newest first.

    Customers are split apart. Of those that are learned from, every item bought is a blank once; of the others, the
    last one. Items of fewer than five customers, returns, and rows without a customer are left out.
    """
    bought, names = _bought(path)
    counts = Counter(item for items in bought.values() for item in items)
    kept = sorted((item for item, count in counts.items() if count >= RARE), key=lambda item: (-counts[item], item))
    places = {item: place for place, item in enumerate(kept, FIRST)}
    histories = [history for items in bought.values() if len(history := [i for i in items if i in places]) >= FEWEST]
    if len(histories) < 1 / HELD_OUT:
        raise ValueError(f"{path} has {len(histories)} customers with {FEWEST} items or more: too few to learn from")
    drawn = np.random.default_rng(0).permutation(len(histories))
    share = round(HELD_OUT * len(histories))
    fates = np.full(len(histories), LEARN)
    fates[drawn[:share]], fates[drawn[share : 2 * share]] = CHOOSE, TEST
    before, answers, parts = [], [], []
    for items, fate in zip(histories, fates, strict=True):
        for at in range(1, len(items)) if fate == LEARN else (len(items) - 1,):
            before.append(items[max(0, at + 1 - HISTORY) : at][::-1])
            answers.append(places[items[at]] - FIRST)
            parts.append(fate)
    words = ["", "…", *(names[item] for item in kept)]
    return Blanks(_padded(before, places, HISTORY), np.array(answers, np.int32), np.array(parts), words, len(kept))


def _bought(path: str | Path) -> tuple[dict[int, list[str]], dict[str, str]]:
    """Distinct items of each customer, in the order they were first bought, and what items are called."""
    rows = retail_rows(path, {"StockCode", "Description", "Quantity", "InvoiceDate", "CustomerID"})
    names: dict[str, str] = {}
    sold = []
    for number, row in enumerate(rows):
        if row["CustomerID"] and float(row["Quantity"]) > 0:
            sold.append((int(float(row["CustomerID"])), retail_time(row), number, row["StockCode"]))
            names.setdefault(row["StockCode"], row["Description"].strip().lower())
    bought: dict[int, dict[str, None]] = {}
    for who, _, _, item in sorted(sold):
        bought.setdefault(who, {}).setdefault(item)
    return {who: list(items) for who, items in bought.items()}, names


def _padded(
    sequences: Iterable[Sequence[str]], places: dict[str, int], most: int, other: int = PADDING
) -> Int[np.ndarray, "count n"]:
    sequences = list(sequences)
    longest = max(map(len, sequences), default=0)
    ids = np.full((len(sequences), min(longest + 1, most)), PADDING, np.int32)
    ids[:, 0] = BLANK
    for row, words in zip(ids, sequences, strict=True):
        row[1 : len(words) + 1] = [places.get(word, other) for word in words]
    return ids


READERS: dict[str, Callable[[str | Path], Blanks]] = {"sentiment": reviews, "recommendation": histories}


def keep(blanks: Blanks, folder: Path, name: str) -> dict[str, Any]:
    """Write sequences into a study's folder; their facts."""
    digest = digest_of(blanks.ids, blanks.answers, blanks.parts)
    facts = {"digest": digest, "choices": blanks.choices, "words": len(blanks.words)}
    arrays = {"ids": blanks.ids, "answers": blanks.answers, "parts": blanks.parts, "words": np.array(blanks.words)}
    folder.mkdir(parents=True, exist_ok=True)
    write_all({folder / array_file(name, digest): npz_bytes({"choices": blanks.choices, **arrays})})
    return {**facts, "sequences": [int((blanks.parts == part).sum()) for part in (LEARN, CHOOSE, TEST)]}


def load(folder: Path, name: str, digest: str) -> Blanks:
    """Sequences that were kept there."""
    with np.load(folder / array_file(name, digest), allow_pickle=False) as file:
        ids, answers, parts, words = (file[key] for key in ("ids", "answers", "parts", "words"))
        return Blanks(ids, answers, parts, words.tolist(), int(file["choices"]))


class BlankModel(nn.Module):
    """Logits of the masked first token: an Encoder with tied input and output embeddings."""

    def __init__(
        self,
        words: int,
        choices: int,
        length: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.choices, self.width = choices, width
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.body = Encoder(width, depth, heads, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Int[Tensor, "batch n"]) -> Float[Tensor, "batch choices"]:
        """Logits at the masked token."""
        return self.filled(self.tokens(ids), ids != PADDING)

    def filled(self, vectors: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"]) -> Float[Tensor, "batch k"]:
        """Logits at the masked token, from token embeddings."""
        return self.choose(self.read(vectors, mask)[:, 0])

    def read(
        self, vectors: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"]
    ) -> Float[Tensor, "batch n dim"]:
        """The output at every token."""
        return self.body(self.dropout(vectors + self.places.weight[: vectors.shape[1]]), mask)

    def choose(self, read: Float[Tensor, "some dim"]) -> Float[Tensor, "some choices"]:
        """Logits of all candidates at some tokens."""
        return read @ self.tokens.weight[FIRST : FIRST + self.choices].mT


def hide(ids: Int[Tensor, "batch n"], most: float, generator: torch.Generator) -> Int[Tensor, "batch n"]:
    """Mask a random share of each sequence, drawn between 0 and `most`."""
    shares = most * torch.rand(len(ids), 1, generator=generator)
    return ids.masked_fill((torch.rand(ids.shape, generator=generator) < shares) & (ids > BLANK), BLANK)


def learn(model: BlankModel, blanks: Blanks, recipe: Recipe, batch: int, most: float) -> None:
    """Train on randomly masked sequences, and keep the weights with the best validation accuracy.

    A model that has never seen a hidden token would answer to the hiding itself. Hidden tokens that are choices, as
    items are, are asked for as the blank is.
    """
    device = next(model.parameters()).device
    ids, answers = blanks.part(LEARN)
    checked = [part.to(device) for part in blanks.part(CHOOSE)]

    def draw(step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(len(ids), (batch,), generator=generator)
        whole = ids[rows]
        return whole.to(device), hide(whole, most, generator).to(device), answers[rows].to(device)

    def loss(model: nn.Module, drawn: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        whole, hidden, answers = drawn
        wanted = whole.where((hidden == BLANK) & (whole < FIRST + blanks.choices), PADDING)
        wanted[:, 0] = answers + FIRST
        asked = wanted != PADDING
        assert isinstance(model, BlankModel)
        read = model.read(model.tokens(hidden), hidden != PADDING)
        return cross_entropy(model.choose(read[asked]).float(), wanted[asked] - FIRST)

    def validate(model: nn.Module) -> float:
        parts = zip(*(x.split(250) for x in checked), strict=True)
        return float(torch.stack([cross_entropy(model(inputs).float(), truth) for inputs, truth in parts]).mean())

    train(model, draw, loss, recipe, validate=validate)


@torch.no_grad()
def right(model: BlankModel, ids: Int[Tensor, "count n"], answers: Int[Tensor, " count"], most: int = 1) -> float:
    """Top-`most` accuracy; items in the history are not candidates."""
    device, hits = next(model.parameters()).device, 0
    for some, truth in zip(ids.split(250), answers.split(250), strict=True):
        logits = unseen(model(some.to(device)).float(), some.to(device))
        hits += int((logits.topk(most).indices == truth.to(device).unsqueeze(1)).sum())
    return hits / len(answers)


def unseen(logits: Float[Tensor, "batch choices"], ids: Int[Tensor, "batch n"]) -> Float[Tensor, "batch choices"]:
    """−∞ for candidates that occur in the sequence: items already bought are not recommended."""
    wide = torch.cat((logits.new_zeros(len(logits), FIRST), logits), 1)
    taken = ids.long().where(ids < wide.shape[1], PADDING)
    return wide.scatter(1, taken, -torch.inf)[:, FIRST:]
