"""Texts, and files of token ids, as batches for a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.listening.hooks import Batch
from keyquery.support.files import read_text

LENGTH = 128  # default tokens per window
TOKENS = 20_000  # default limit of tokens in total
SIZE = 16  # default sequences per batch
# From the first non-blank character of a line to its end, as in `str.splitlines`; skips blank lines.
LINE = re.compile("\\S[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*")
LONG = 100_000  # characters tokenised at once


def read_lines(path: str | Path) -> list[str]:
    """The non-empty lines of a text file."""
    lines = [line.group().rstrip() for line in LINE.finditer(read_text(path))]
    if not lines:
        raise ValueError(f"{path} holds no text")
    return lines


def text_batches(
    lines: list[str], tokenizer: Any, length: int = LENGTH, tokens: int = TOKENS, size: int = SIZE
) -> Iterator[Batch]:
    """Padded batches of token ids and their mask: each line is a sequence, long ones are cut into windows of `length`.

    Lines of more than 100,000 characters are tokenised in parts; the last window is cut to `tokens` in total.
    """
    added = getattr(tokenizer, "num_special_tokens_to_add", int)()
    if length <= added:
        raise ValueError(f"length must be at least {added + 1}, with {added} special tokens, got {length}")
    windows: list[list[int]] = []
    left = tokens
    for window in _windows(lines, tokenizer, length):
        if left < 2:
            break
        if len(window) > 1:
            windows.append(window[:left])
            left -= len(windows[-1])
    if not windows:
        raise ValueError("the text is too short: no line has two tokens")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    for start in range(0, len(windows), size):
        yield _padded(windows[start : start + size], padding)


def read_ids(path: str | Path, heads: Heads) -> list[list[int]]:
    """Sequences of token ids from a file, one per line; every id must be in the model's vocabulary."""
    size = (heads.embedding_shape or (None,))[0]
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.replace(",", " ").split()
        if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 10)]:
            raise ValueError(f"{path}, line {number}: expected token ids (non-negative integers), got {wrong[0]!r:.40}")
        ids = list(map(int, words))
        if size is not None and max(ids, default=0) >= size:
            raise ValueError(
                f"{path}, line {number}: token id {max(ids)} is out of range: the model's largest is {size - 1}"
            )
        if len(ids) == 1:
            raise ValueError(f"{path}, line {number}: a sequence needs at least two token ids, got one")
        rows += [ids] if ids else []
    if not rows:
        raise ValueError(f"{path} holds no token ids")
    return rows


def id_batches(rows: list[list[int]], tokens: int = TOKENS, size: int = SIZE) -> list[Batch]:
    """Padded batches of token-id sequences, whole sequences only, up to `tokens` tokens in total."""
    count = sum(total <= tokens for total in accumulate(map(len, rows)))
    if count == 0:
        raise ValueError(
            f"the first sequence has {len(rows[0])} token ids, more than the limit of {tokens}: raise --tokens"
        )
    return [_padded(rows[start : min(start + size, count)], 0) for start in range(0, count, size)]


def without_padding(batch: Batch, row: int) -> Batch:
    """One sequence of a batch, without its padding."""
    mask = batch.get("attention_mask")
    real = mask[row].bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def of_row(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        part = value[row]
        return (part[real] if real is not None and part.ndim and len(part) == len(real) else part).unsqueeze(0)

    return {name: of_row(value) for name, value in batch.items()}


def with_decoder_ids(batches: list[Batch]) -> list[Batch]:
    """Batches for an encoder-decoder: its decoder reads the same ids as its encoder."""
    return [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]


def typical_length(batches: Iterable[Batch]) -> int | None:
    """Token-weighted mean sequence length: Σn²/Σn, rounded; None if batches have no tokens.

    >>> typical_length([{"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}])
    2
    """
    lengths: list[int] = []
    for batch in batches:
        mask, ids = (batch.get(name) for name in ("attention_mask", "input_ids"))
        if isinstance(mask, Tensor) and mask.ndim == 2:
            lengths += mask.bool().sum(1).tolist()
        elif isinstance(ids, Tensor) and ids.ndim == 2:
            lengths += [ids.shape[1]] * len(ids)
    return round(sum(n * n for n in lengths) / sum(lengths)) if any(lengths) else None


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without special tokens, by a transformers tokenizer or keyquery's own."""
    if hasattr(tokenizer, "num_special_tokens_to_add"):
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])  # keyquery's own adds none


def special_tokens(tokenizer: Any, *texts: str) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer adds before and after a text.

    They are read off the first text that has tokens: the letter a, or one of `texts` where the vocabulary lacks it.
    """
    for text in ("a", *texts):
        if bare := encoded(tokenizer, text):
            whole = list(tokenizer(text)["input_ids"])
            start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
            return whole[:start], whole[start + len(bare) :]
    raise ValueError("the tokenizer gives no tokens for the text")


def _parts(line: str) -> Iterator[str]:
    """A line, or parts of a very long one, split at spaces where possible."""
    start = 0
    while len(line) - start > LONG:
        end = line.rfind(" ", start + 1, start + LONG)
        end = end if end > 0 else start + LONG
        yield line[start:end]
        start = end
    yield line[start:]


def _windows(lines: list[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Token ids of each line in windows of `length`, each with special tokens.

    Windows are cut here: whether a tokenizer returns more than the first depends on the version of transformers.
    Tokenizers that are not fast have special tokens at the ends of a line only.
    """
    fast = getattr(tokenizer, "is_fast", False)
    from_end = fast and getattr(tokenizer, "truncation_side", "right") == "left"
    before: list[int] | None = None
    after: list[int] = []
    for part in (part for line in lines for part in _parts(line)):
        ids = encoded(tokenizer, part) if fast else list(tokenizer(part)["input_ids"])
        if fast and not ids:  # characters that the tokenizer drops
            yield list(tokenizer(part)["input_ids"])
            continue
        if before is None:
            before, after = special_tokens(tokenizer, part) if fast else ([], [])
        for window in _cut(ids, length - len(before) - len(after), from_end):
            yield [*before, *window, *after]


def _cut(ids: list[int], length: int, from_end: bool) -> list[list[int]]:
    """Ids in windows of `length`, from the start, or from the end as a tokenizer that truncates on the left."""
    if from_end:
        return [ids[max(end - length, 0) : end] for end in range(len(ids), 0, -length)]
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _padded(windows: list[list[int]], padding: int) -> dict[str, Tensor]:
    longest = max(map(len, windows))
    ids = torch.full((len(windows), longest), padding)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        ids[row, : len(window)] = torch.tensor(window)
        mask[row, : len(window)] = 1
    return {"input_ids": ids, "attention_mask": mask}
