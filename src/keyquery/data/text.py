"""Text as training data: a corpus file, its tokenizer, and windows of token ids."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from keyquery.checkpoints.tokenizer import PATTERN, Tokenizer
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.files import LONGEST, read_text


def read_corpus(path: str | Path, longest: int | None = None) -> str:
    """The text of a file, UTF-8, packed by xz or gzip or not; with lines of at most `longest` letters."""
    text = read_text(path, longest=longest)
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def read_column(path: str | Path, column: str = "text") -> list[str]:
    """One text a row: a column of a tab-separated file with a header, packed or not; quotes are plain characters.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "films.tsv").write_text('label\\ttext\\n1\\tA "fine" film.\\n0\\tToo long.\\n')
    ...     read_column(Path(folder, "films.tsv"))
    ['A "fine" film.', 'Too long.']
    """
    header, *lines = read_corpus(path, LONGEST).rstrip("\n").split("\n")
    names = header.rstrip("\r").split("\t")
    check_choice("column", column, names)
    texts, place = [], names.index(column)
    for number, line in enumerate(lines, 2):
        row = line.rstrip("\r").split("\t")
        if len(row) != len(names):
            raise ValueError(f"{path}, line {number}: expected {len(names)} columns, as in the header, got {len(row)}")
        texts.append(row[place])
    if not texts:
        raise ValueError(f"{path} holds a header and no rows")
    return texts


def unwrap(text: str) -> str:
    """One line a paragraph: lines that were broken to fit a page are joined, blank lines are left out.

    >>> unwrap("It was the best\\nof times.\\n\\n\\nIt was")
    'It was the best of times.\\nIt was'
    """
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\f", text))
    return "\n".join(part for part in paragraphs if part)


def train_tokenizer(text: str, size: int) -> Tokenizer:
    """Byte-level BPE with `size` tokens, [PAD] and [MASK] the first two. Needs the extra `hf`."""
    library = optional("tokenizers", "a new tokenizer")
    made = library.Tokenizer(library.models.BPE())
    before = library.pre_tokenizers
    cut = before.Split(library.Regex(PATTERN), "isolated")
    made.pre_tokenizer = before.Sequence([cut, before.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = library.decoders.ByteLevel()
    alphabet = before.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["[PAD]", "[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    return Tokenizer(json.loads(made.to_str()))


def encode_corpus(text: str, tokenizer: Tokenizer) -> Int[Tensor, " tokens"]:
    """All token ids of a long text; a word is encoded once, however often it stands there."""
    return torch.tensor(tokenizer.encode(text), dtype=torch.int32)


def windows(
    ids: Int[Tensor, " tokens"], count: int, length: int, generator: torch.Generator
) -> Int[Tensor, "count length"]:
    """Windows of a token stream, drawn uniformly.

    >>> windows(torch.arange(100), 2, 5, torch.Generator().manual_seed(0)).diff().unique()
    tensor([1])
    """
    if len(ids) <= length:
        raise ValueError(f"the corpus has {len(ids)} tokens, too few for windows of {length}")
    starts = torch.randint(len(ids) - length, (count, 1), generator=generator).to(ids.device)
    return ids[starts + torch.arange(length, device=ids.device)].long()
