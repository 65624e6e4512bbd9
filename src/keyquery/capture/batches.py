"""A text file as batches that a model takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.capture.hooks import Batch
from keyquery.checkpoints import Heads
from keyquery.support.files import read_text

LENGTH = 128  # tokens of a window, wherever none is asked for
# From the first sign of a line that is no blank to its end, as `str.splitlines` knows it: blank lines cost nothing.
LINE = re.compile("\\S[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*")
LONG = 100_000  # letters of a line that go to a tokenizer at once


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text file that hold anything.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "a.txt").write_text("one\\n\\n two \\n")
    ...     read_lines(Path(folder, "a.txt"))
    ['one', 'two']
    """
    lines = [line.group().rstrip() for line in LINE.finditer(read_text(path))]
    if not lines:
        raise ValueError(f"{path} holds no text")
    return lines


def text_batches(
    lines: list[str], tokenizer: Any, length: int = LENGTH, tokens: int = 20_000, size: int = 16
) -> Iterator[Batch]:
    """Lines as padded batches of token ids: each line is a sequence, long ones are cut into windows of `length`.

    Lines of more than 100,000 letters are tokenised in parts. No more than `tokens` tokens come: the last window is
    cut. `tokenizer` is one of transformers.
    """
    added = getattr(tokenizer, "num_special_tokens_to_add", int)()
    if length <= added:
        raise ValueError(f"length must be at least {added + 1}, since {added} tokens are special, got {length}")
    windows: list[list[int]] = []
    left = tokens
    for window in (ids for line in lines for part in _parts(line) for ids in _windows(part, tokenizer, length)):
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
    """The sequences of a file of token ids, one a line, for a model; every id must be one of its embeddings.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "ids.txt").write_text("5 6 7 5 6 7\\n\\n8, 9\\n")
    ...     read_ids(Path(folder, "ids.txt"), kq.read(kq.models.DECODER))
    [[5, 6, 7, 5, 6, 7], [8, 9]]
    """
    size = (heads.embedding_shape or (None,))[0]
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.replace(",", " ").split()
        if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 10)]:
            raise ValueError(f"{path}, line {number}: expected token ids, integers from 0 on, got {wrong[0]!r:.40}")
        ids = list(map(int, words))
        if size is not None and max(ids, default=0) >= size:
            raise ValueError(f"{path}, line {number}: {max(ids)} is no token of the model, whose ids end at {size - 1}")
        if len(ids) == 1:
            raise ValueError(f"{path}, line {number}: a sequence needs two token ids, got one")
        rows += [ids] if ids else []
    if not rows:
        raise ValueError(f"{path} holds no token ids")
    return rows


def id_batches(rows: list[list[int]], tokens: int = 20_000, size: int = 16) -> list[Batch]:
    """Sequences of token ids as padded batches; none is cut, and none begins that would end beyond `tokens`.

    >>> [batch["input_ids"].tolist() for batch in id_batches([[5, 6, 7], [8, 9], [1, 2]], tokens=5)]
    [[[5, 6, 7], [8, 9, 0]]]
    """
    count = sum(total <= tokens for total in accumulate(map(len, rows)))
    if count == 0:
        raise ValueError(
            f"the first sequence has {len(rows[0])} token ids, and at most {tokens} are run: raise --tokens"
        )
    return [_padded(rows[start : min(start + size, count)], 0) for start in range(0, count, size)]


def typical_length(batches: Iterable[Batch]) -> int | None:
    """How long the sequence is that a token finds itself in, on average: Σn²/Σn over all sequences, rounded.

    Lengths are those of the attention masks, or of whole batches; None where batches hold no tokens.

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


def _parts(line: str) -> Iterator[str]:
    """A line, or of a very long one parts that end at a blank where there is one."""
    start = 0
    while len(line) - start > LONG:
        end = line.rfind(" ", start + 1, start + LONG)
        end = end if end > 0 else start + LONG
        yield line[start:end]
        start = end
    yield line[start:]


def _windows(line: str, tokenizer: Any, length: int) -> list[list[int]]:
    """The ids of a line in windows of `length`, each with the special tokens that the model expects."""
    if getattr(tokenizer, "is_fast", False):
        cut = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
        return list(tokenizer(line, **cut)["input_ids"])
    ids = tokenizer(line)["input_ids"]
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _padded(windows: list[list[int]], padding: int) -> dict[str, Tensor]:
    longest = max(map(len, windows))
    ids = torch.full((len(windows), longest), padding)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        ids[row, : len(window)] = torch.tensor(window)
        mask[row, : len(window)] = 1
    return {"input_ids": ids, "attention_mask": mask}
