"""A tokenised text: its word pieces, and the words they form."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.checkpoints.vocabulary import readable

BLANKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "Ġ": "␣", "▁": "␣", "Ċ": "⏎", "ĉ": "⇥"})  # display symbols
WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]+")


@dataclass(frozen=True)
class Words:
    """Token ids grouped into words: the text of each word, its positions, and whether it is real text.

    A special token, such as [CLS], is not real text and a word of its own.
    """

    ids: list[int]
    texts: list[str]
    places: list[list[int]]
    real: list[bool]

    def batch(self) -> dict[str, Tensor]:
        """The ids as a model batch."""
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def merged(self, maps: Float[Tensor, "heads n n"]) -> Float[Tensor, "heads m m"]:
        """Attention between words: averaged over the pieces of the query word, summed over those of the key word."""
        of = torch.zeros(len(self.places), len(self.ids), dtype=maps.dtype, device=maps.device)
        for word, pieces in enumerate(self.places):
            of[word, pieces] = 1.0
        return (of / of.sum(1, keepdim=True)) @ maps @ of.mT


def words_of(text: str, tokenizer: Any, merge: bool = True) -> Words:
    """Tokenise a text with a transformers tokenizer or keyquery's own; without `merge` every piece is a word.

    Words are runs of letters and digits, and runs of other characters. If a tokenizer has no offsets, a piece with a
    leading space, or its marker, starts a word.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must contain words, got {text!r:.40}")
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
        owners = _by_offsets(text, [tuple(span) for span in encoded["offset_mapping"]])
        names = [text[a:b].strip() for a, b in encoded["offset_mapping"]]
    else:
        ids = list(tokenizer(text)["input_ids"])
        special = set(getattr(tokenizer, "all_special_ids", []))
        added = [int(number in special) for number in ids]
        names, owners = _by_names(ids, tokenizer)
    if not ids:
        raise ValueError(f"the tokenizer returns no tokens for the text {text!r:.40}")
    return _grouped(ids, names, owners, added, tokenizer, merge)


def _by_offsets(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The word of each piece, by the offset of its first non-space character; −1 for none."""
    words, owners = [word.span() for word in WORD.finditer(text)], []
    for start, end in spans:
        start += len(text[start:end]) - len(text[start:end].lstrip())
        owner = bisect(words, (start, len(text))) - 1  # the last word that begins here or before
        owners.append(owner if owner >= 0 and start < min(end, words[owner][1]) else -1)
    return owners


def _by_names(ids: Sequence[int], tokenizer: Any) -> tuple[list[str], list[int]]:
    """The text of each piece, and its word, from the markers in token names."""
    names: list[str] = []
    owners, word = [], -1
    for name in tokenizer.convert_ids_to_tokens(list(ids)):
        bare = name.removeprefix("##").lstrip("ĠĊ▁")
        goes_on = name.startswith("##") or not name.startswith(("Ġ", "Ċ", "▁"))
        letters = bool(bare) and re.match(r"\w", bare) is not None
        same = bool(names) and goes_on and letters == (re.match(r"\w", names[-1]) is not None)
        word += not same
        names.append(bare)
        owners.append(word)
    if not any(name.startswith(("##", "Ġ", "▁")) for name in tokenizer.convert_ids_to_tokens(list(ids))):
        owners = list(range(len(ids)))  # word boundaries are unknown
    return names, owners


def _grouped(
    ids: list[int], names: list[str], owners: list[int], added: Sequence[int], tokenizer: Any, merge: bool
) -> Words:
    texts: list[str] = []
    places: list[list[int]] = []
    last = -1
    for index, (owner, special) in enumerate(zip(owners, added, strict=True)):
        if merge and not special and owner >= 0 and owner == last:
            texts[-1] += names[index]
            places[-1].append(index)
        else:
            name = tokenizer.convert_ids_to_tokens([ids[index]])[0]
            texts.append(name if special else names[index] or name.translate(BLANKS))
            places.append([index])
        last = -1 if special else owner
    if not getattr(tokenizer, "is_fast", False) and of_bytes(tokenizer):
        texts = [readable(text) for text in texts]
    return Words(ids, texts, places, [not added[word[0]] for word in places])


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Display texts of tokens, without space markers; whitespace as symbols.

    Byte-level tokens are decoded, and partial characters shown as bytes.
    """
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(ids))]
    names = [readable(name) for name in names] if of_bytes(tokenizer) else names
    return [name.lstrip("ĠĊ▁ ") or name.translate(BLANKS) for name in names]


def token_text(number: int, tokenizer: Any) -> str:
    """The text of a token, or its id without a tokenizer."""
    text = tokenizer.decode([number]) if hasattr(tokenizer, "decode") else ""
    return text if text and "\ufffd" not in text else f"#{number}"


def of_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer is byte-level (with Ġ for a space)."""
    return isinstance(tokenizer, Tokenizer) or (hasattr(tokenizer, "get_vocab") and "Ġ" in tokenizer.get_vocab())
