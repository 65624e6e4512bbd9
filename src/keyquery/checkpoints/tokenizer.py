"""Byte-level pair encoding out of a tokenizer.json, without the library that wrote it."""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from keyquery.checkpoints.sources import read_json
from keyquery.files import beside, write_text

# Words with the space before them, single digits, runs of signs, runs of blanks; read alike by Python and by Rust.
PATTERN = r" ?[^\W\d_]+| ?\d| ?(?:[^\w\s]|_)+|\s+"
WORDS = re.compile(PATTERN)


class Tokenizer:
    """Text to token ids and back, for files whose model is BPE over bytes and whose words one pattern finds.

    That is what the models that ship use, so that they run without the `tokenizers` library. Called like a tokenizer
    of transformers; texts are data, no special token is ever read out of them.
    """

    is_fast = False

    def __init__(self, facts: dict[str, Any]) -> None:
        try:
            self._take(facts)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"this tokenizer.json is not whole: {type(error).__name__}: {error}") from None
        self._pieces = lru_cache(maxsize=50_000)(self._merge)

    def _take(self, facts: dict[str, Any]) -> None:
        model, steps = facts["model"], (facts.get("pre_tokenizer") or {}).get("pretokenizers") or []
        patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
        # Another pattern is not run: matching one that a stranger wrote may take for ever.
        if model.get("type") != "BPE" or patterns != [PATTERN] or steps[-1]["type"] != "ByteLevel":
            raise ValueError("this tokenizer.json is not byte-level BPE with keyquery's pattern; it needs transformers")
        self.facts = facts
        self.vocabulary: dict[str, int] = dict(model["vocab"])
        if not all(isinstance(number, int) and number >= 0 for number in self.vocabulary.values()):
            raise ValueError("this tokenizer.json is not whole: ids must be numbers from 0")
        absent = [symbol for symbol in symbols() if symbol not in self.vocabulary]
        if absent:
            raise ValueError(f"this tokenizer.json is not whole: it has no token {absent[0]!r}, which is a byte")
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        # A merge whose result is no token would make pieces without an id.
        known = ((str(one), str(other)) for one, other in pairs if str(one) + str(other) in self.vocabulary)
        self._ranks = {pair: rank for rank, pair in enumerate(known)}
        special = {token["content"]: token["id"] for token in facts.get("added_tokens", [])}
        self.pad_token_id, self.mask_token_id = special.get("[PAD]"), special.get("[MASK]")
        self._texts = {number: text for text, number in self.vocabulary.items()}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder, or of a tokenizer.json."""
        path = Path(path)
        return cls(read_json(beside(path, "tokenizer.json") if path.is_dir() else path))

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, as the `tokenizers` library reads it too."""
        write_text(Path(folder) / "tokenizer.json", json.dumps(self.facts, ensure_ascii=False))

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids of a text, under the name that models take them by."""
        return {"input_ids": self.encode(text)}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [self.vocabulary[piece] for word in self._cut(text) for piece in self._pieces(word)]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; what is no whole character becomes a replacement sign."""
        symbols = "".join(
            self._texts[number] for number in ids if number not in (self.pad_token_id, self.mask_token_id)
        )
        return bytes(from_symbols()[symbol] for symbol in symbols).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Each token as it is stored."""
        return [self._texts[number] for number in ids]

    def _cut(self, text: str) -> list[str]:
        """Words as strings of byte symbols; what the pattern leaves between words is a word too."""
        words, end = [], 0
        for found in WORDS.finditer(text):
            words += [text[end : found.start()], found.group()]
            end = found.end()
        table = symbols()
        return ["".join(table[byte] for byte in word.encode()) for word in [*words, text[end:]] if word]

    def _merge(self, word: str) -> tuple[str, ...]:
        """The pieces of a word: of all neighbouring pairs, the one learned first is joined first."""
        pieces = list(word)
        while len(pieces) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(pieces)]
            best = min(ranks)
            if best == len(self._ranks):
                break
            at = ranks.index(best)
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        return tuple(pieces)


@cache
def symbols() -> list[str]:
    """A printable character for each byte: itself where it prints, else one from 256 on, in order.

    >>> symbols()[ord("a")], symbols()[ord(" ")]
    ('a', 'Ġ')
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


@cache
def from_symbols() -> dict[str, int]:
    """The byte of each such character."""
    return {symbol: byte for byte, symbol in enumerate(symbols())}
