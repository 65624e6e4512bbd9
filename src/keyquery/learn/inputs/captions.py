"""Captions as word ids, with a vocabulary built from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

PAD, MASK = 0, 1  # padding, and masked or unknown words
FIRST = 2  # id of the first word
PATTERN = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\w\s]|_")


class Vocabulary:
    """Lower-case words and punctuation marks, most frequent first. Unknown words are [MASK]."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        if len(set(self.names)) != len(self.names) or not all(isinstance(name, str) for name in self.names):
            raise ValueError("the words of a vocabulary must be unique strings")
        self._numbers = {name: number for number, name in enumerate(self.names, FIRST)}

    @classmethod
    def of(cls, texts: Sequence[str]) -> Vocabulary:
        """All words of the texts."""
        counts = Counter(word for text in texts for word in cut(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def __len__(self) -> int:
        """Number of ids, including padding and mask."""
        return FIRST + len(self.names)

    def unseen(self, texts: Sequence[str]) -> list[str]:
        """Words of texts that are not in the vocabulary, sorted."""
        return sorted({word for text in texts for word in cut(text)} - self._numbers.keys())

    def encode(self, text: str) -> Int[np.ndarray, " words"]:
        """The id of each word."""
        return np.array([self._numbers.get(word, MASK) for word in cut(text)], dtype=np.int64)

    def batch(self, texts: Sequence[str]) -> Int[Tensor, "batch longest"]:
        """Texts as rows, padded at the end."""
        rows = [torch.from_numpy(self.encode(text)) for text in texts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def cut(text: str) -> list[str]:
    """The lower-case words of a text."""
    return PATTERN.findall(text.lower())


def texts_of(texts: Any) -> list[str]:
    """Validated texts: a list, each with at least one word."""
    if isinstance(texts, str) or not hasattr(texts, "__len__") or not hasattr(texts, "__iter__"):
        raise TypeError(f"texts must be a list of texts, one for each image, got {type(texts).__name__}")
    captions = list(texts)
    if not captions:
        raise ValueError("texts must hold at least one text, got none")
    for number, text in enumerate(captions):
        if not isinstance(text, str):
            raise TypeError(f"texts[{number}] must be a text, got {type(text).__name__}")
        if not cut(text):
            raise ValueError(f"texts[{number}] has no word: {text!r}")
    return [str(text) for text in captions]
