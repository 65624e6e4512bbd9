"""A text file as batches that a model takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.capture.watch import Batch


def read_text(path: str | Path) -> list[str]:
    """The lines of a text file that hold anything.

    >>> import tempfile; name = tempfile.mktemp(); _ = Path(name).write_text("one\\n\\n two \\n")
    >>> read_text(name)
    ['one', 'two']
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no text")
    return lines


def text_batches(
    lines: list[str], tokenizer: Any, length: int = 128, tokens: int = 20_000, size: int = 16
) -> Iterator[Batch]:
    """Lines as padded batches of token ids: each line is a sequence, long ones are cut into windows of `length`.

    Stops after `tokens` tokens. `tokenizer` is one of transformers.
    """
    windows: list[list[int]] = []
    for line in lines:
        windows += _windows(line, tokenizer, length)
        if sum(map(len, windows)) >= tokens:
            break
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ValueError("the text is too short: no line has two tokens")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    for start in range(0, len(windows), size):
        yield _padded(windows[start : start + size], padding)


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
