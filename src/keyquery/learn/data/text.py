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
    """Load a UTF-8 text file.

    Parameters
    ----------
    path
        The file, plain or compressed (.xz, .gz).

    Returns
    -------
    str
        The text.
    """
    return _text(path)


def _text(path: str | Path, longest: int | None = None) -> str:
    text = read_text(path, longest=longest)
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def read_column(path: str | Path, column: str = "text") -> list[str]:
    """Load one column of a tab-separated file with a header; quotes are plain characters.

    Parameters
    ----------
    path
        The file, plain or compressed (.xz, .gz).
    column
        Name of the column. Default: "text".

    Returns
    -------
    list of str
        One text per row.
    """
    header, *lines = _text(path, LONGEST).rstrip("\n").split("\n")
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

    Parameters
    ----------
    text
        Paragraphs separated by blank lines.

    Returns
    -------
    str
        The text with one line per paragraph.

    Examples
    --------
    >>> unwrap("It was the best\\nof times.\\n\\n\\nIt was")
    'It was the best of times.\\nIt was'
    """
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\f", text))
    return "\n".join(part for part in paragraphs if part)


def train_tokenizer(text: str, size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, with [PAD] and [MASK] as its first two tokens.

    Parameters
    ----------
    text
        The corpus.
    size
        Vocabulary size.

    Returns
    -------
    Tokenizer
        The trained tokenizer.
    """
    library = optional("tokenizers", "a new tokenizer")
    trained = byte_level({}, [])
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["[PAD]", "[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(text.splitlines(keepends=True), trainer)
    return Tokenizer(json.loads(trained.to_str()))


def encode_corpus(text: str, tokenizer: Tokenizer) -> Int[Tensor, " tokens"]:
    """Token ids of a long text; each distinct word is encoded once.

    Parameters
    ----------
    text
        The corpus.
    tokenizer
        Such as that of `train_tokenizer`.

    Returns
    -------
    Tensor
        int32 (tokens,).
    """
    return torch.tensor(tokenizer.encode(text), dtype=torch.int32)


def windows(
    ids: Int[Tensor, " tokens"], count: int, length: int, generator: torch.Generator
) -> Int[Tensor, "count length"]:
    """Sample windows of a token stream uniformly.

    Parameters
    ----------
    ids
        Token ids (tokens,).
    count, length
        Number of windows and tokens per window.
    generator
        Random generator.

    Returns
    -------
    Tensor
        int64 (count, length).
    """
    if len(ids) <= length:
        raise ValueError(f"the corpus has {len(ids)} tokens, too few for windows of {length}")
    starts = torch.randint(len(ids) - length, (count, 1), generator=generator).to(ids.device)
    return ids[starts + torch.arange(length, device=ids.device)].long()
