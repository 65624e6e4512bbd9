"""Text as training data: a corpus file, its tokenizer, and windows of token ids."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from keyquery.checkpoints.tokenizer import Tokenizer, byte_level
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.files import LONGEST, read_text


def read_corpus(path: str | Path) -> str:
    """The text of a UTF-8 file, plain or compressed (.xz, .gz)."""
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def read_column(path: str | Path, column: str = "text") -> list[str]:
    """One column of a tab-separated file with a header, plain or compressed (.xz, .gz); quotes are plain characters."""
    header, *lines = read_text(path, longest=LONGEST).rstrip("\n").split("\n")
    names = header.rstrip("\r").split("\t")
    check_choice("column", column, names)
    texts, index = [], names.index(column)
    for number, line in enumerate(lines, 2):
        row = line.rstrip("\r").split("\t")
        if len(row) != len(names):
            raise ValueError(f"{path}, line {number}: expected {len(names)} columns, as in the header, got {len(row)}")
        texts.append(row[index])
    if not texts:
        raise ValueError(f"{path} holds a header and no rows")
    return texts


def unwrap(text: str) -> str:
    """Join hard-wrapped lines: one line per paragraph, without blank lines.

    >>> unwrap("It was the best\\nof times.\\n\\n\\nIt was")
    'It was the best of times.\\nIt was'
    """
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\f", text))
    return "\n".join(part for part in paragraphs if part)


def train_tokenizer(text: str, size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `size` tokens, of which [PAD] and [MASK] are the first two."""
    library = optional("tokenizers", "a new tokenizer")
    trained = byte_level({}, [])
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["[PAD]", "[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(text.splitlines(keepends=True), trainer)
    return Tokenizer(json.loads(trained.to_str()))


def encode_corpus(text: str, tokenizer: Tokenizer) -> Int[Tensor, " tokens"]:
    """Token ids of a long text, int32; each distinct word is encoded once."""
    return torch.tensor(tokenizer.encode(text), dtype=torch.int32)


def windows(
    ids: Int[Tensor, " tokens"], count: int, length: int, generator: torch.Generator
) -> Int[Tensor, "count length"]:
    """Sample `count` windows of `length` tokens of a token stream uniformly."""
    if len(ids) <= length:
        raise ValueError(f"the corpus has {len(ids)} tokens, too few for windows of {length}")
    starts = torch.randint(len(ids) - length, (count, 1), generator=generator).to(ids.device)
    return ids[starts + torch.arange(length, device=ids.device)].long()
