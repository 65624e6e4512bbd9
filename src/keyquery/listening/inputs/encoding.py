"""Texts as token ids, and the special tokens that a tokenizer puts around them."""

from __future__ import annotations

from typing import Any


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


def token_text(number: int, tokenizer: Any) -> str:
    """The text of a token, or its id without a tokenizer."""
    text = tokenizer.decode([number]) if hasattr(tokenizer, "decode") else ""
    return text if text and "\ufffd" not in text else f"#{number}"
