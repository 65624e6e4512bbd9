"""A text as a model sees it: its pieces, and which of them make up a word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.checkpoints.vocabulary import readable

BLANKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "Ġ": "␣", "▁": "␣", "Ċ": "⏎", "ĉ": "⇥"})  # as they are shown
WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]+")


@dataclass(frozen=True)
class Words:
    """Token ids, and the words they make up: the text of each, its places among the ids, whether it stands for a text.

    What a tokenizer adds, such as [CLS], stands for none and is a word of its own.
    """

    ids: list[int]
    texts: list[str]
    places: list[list[int]]
    real: list[bool]

    def batch(self) -> dict[str, Tensor]:
        """The ids as a model takes them."""
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def merged(self, maps: Float[Tensor, "heads n n"]) -> Float[Tensor, "heads m m"]:
        """Attention between words: the mean over a word's pieces of what they take, the sum of what is taken of them.

        >>> words = Words([5, 6, 7], ["a", "boat"], [[0], [1, 2]], [True, True])
        >>> words.merged(torch.tensor([[[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]]))
        tensor([[[0.5000, 0.5000],
                 [0.2500, 0.7500]]])
        """
        of = torch.zeros(len(self.places), len(self.ids), dtype=maps.dtype, device=maps.device)
        for word, pieces in enumerate(self.places):
            of[word, pieces] = 1.0
        return (of / of.sum(1, keepdim=True)) @ maps @ of.mT


def words_of(text: str, tokenizer: Any, merge: bool = True) -> Words:
    """A text through a tokenizer of transformers, or keyquery's own; without `merge` every piece is a word.

    Words are runs of letters and digits, and runs of other signs. Where a tokenizer does not say where in the text its
    pieces stand, a piece that begins with a space, or whose name has the mark of one, begins a word.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must hold words, got {text!r:.40}")
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        ids, added = list(found["input_ids"]), list(found["special_tokens_mask"])
        owners = _by_offsets(text, [tuple(span) for span in found["offset_mapping"]])
        names = [text[a:b].strip() for a, b in found["offset_mapping"]]
    else:
        ids = list(tokenizer(text)["input_ids"])
        special = set(getattr(tokenizer, "all_special_ids", []))
        added = [int(number in special) for number in ids]
        names, owners = _by_names(ids, tokenizer)
    if not ids:
        raise ValueError(f"the tokenizer makes no token of the text {text!r:.40}")
    return _grouped(ids, names, owners, added, tokenizer, merge)


def _by_offsets(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The word that each piece stands in, by where its first sign that is no space stands; −1 for none."""
    starts = [(word.start(), word.end()) for word in WORD.finditer(text)]
    owners, at = [], 0
    for start, end in spans:
        start += len(text[start:end]) - len(text[start:end].lstrip())
        while at < len(starts) and starts[at][1] <= start:
            at += 1
        inside = at < len(starts) and starts[at][0] <= start < end
        owners.append(at if inside else -1)
    return owners


def _by_names(ids: Sequence[int], tokenizer: Any) -> tuple[list[str], list[int]]:
    """The text of each piece, and the word it belongs to, from the marks in the pieces' own names."""
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
        owners = list(range(len(ids)))  # nothing tells where words begin
    return names, owners


def _grouped(
    ids: list[int], names: list[str], owners: list[int], added: Sequence[int], tokenizer: Any, merge: bool
) -> Words:
    texts: list[str] = []
    places: list[list[int]] = []
    last = -1
    for place, (owner, special) in enumerate(zip(owners, added, strict=True)):
        if merge and not special and owner >= 0 and owner == last:
            texts[-1] += names[place]
            places[-1].append(place)
        else:
            name = tokenizer.convert_ids_to_tokens([ids[place]])[0]
            texts.append(name if special else names[place] or name.translate(BLANKS))
            places.append([place])
        last = -1 if special else owner
    if not getattr(tokenizer, "is_fast", False) and of_bytes(tokenizer):
        texts = [readable(said) for said in texts]
    return Words(ids, texts, places, [not added[place[0]] for place in places])


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Tokens as they are shown: their text, without the mark of a space before it; blanks as signs.

    Byte-level tokens are decoded, and parts of characters are shown as their bytes.

    >>> tokenizer = Tokenizer.load(kq.models.DECODER)
    >>> token_texts(tokenizer.encode("a café\\n"), tokenizer)[-1]
    '⏎'
    """
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(ids))]
    names = [readable(name) for name in names] if of_bytes(tokenizer) else names
    return [name.lstrip("ĠĊ▁ ") or name.translate(BLANKS) for name in names]


def of_bytes(tokenizer: Any) -> bool:
    """Whether the names of tokens are symbols of bytes, a space Ġ among them.

    >>> of_bytes(Tokenizer.load(kq.models.DECODER))
    True
    """
    return isinstance(tokenizer, Tokenizer) or (hasattr(tokenizer, "get_vocab") and "Ġ" in tokenizer.get_vocab())
