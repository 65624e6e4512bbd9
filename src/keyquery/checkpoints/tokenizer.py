"""Byte-level pair encoding out of a tokenizer.json, without the library that wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from typing import Any

from keyquery.checkpoints.sources import read_json
from keyquery.support.files import beside, write_text

# Words with the space before them, single digits, runs of signs, runs of blanks; read alike by Python and by Rust.
PATTERN = r" ?[^\W\d_]+| ?\d| ?(?:[^\w\s]|_)+|\s+"
WORDS = re.compile(PATTERN.replace("+", "++"))  # the same words, without a note of each letter to come back to
LONGEST = 1_000_000  # bytes of a word
KEPT = 64  # symbols of a word whose pieces are kept for the next time


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
        # Other patterns are not run: a regular expression of an untrusted file may take forever.
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
        return [
            self.vocabulary[piece]
            for word in self._cut(text)
            for piece in (self._pieces(word) if len(word) <= KEPT else self._merge(word))
        ]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; what is no whole character becomes a replacement sign."""
        symbols = "".join(
            self._texts[number] for number in ids if number not in (self.pad_token_id, self.mask_token_id)
        )
        return bytes(from_symbols()[symbol] for symbol in symbols).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Each token as it is stored."""
        return [self._texts[number] for number in ids]

    def _cut(self, text: str) -> Iterator[str]:
        """Words as strings of byte symbols; what the pattern leaves between words is a word too."""
        table, end = symbols(), 0
        spans = chain((found.span() for found in WORDS.finditer(text)), [(len(text), len(text))])
        for start, stop in spans:
            for word in (text[end:start], text[start:stop]):
                data = word.encode()
                if len(data) > LONGEST:
                    raise ValueError(f"the text holds a word of {len(data)} bytes; at most {LONGEST} are encoded")
                if data:
                    yield "".join(table[byte] for byte in data)
            end = stop

    def _merge(self, word: str) -> tuple[str, ...]:
        """The pieces of a word: of all neighbouring pairs, the one learned first is joined first, from the left.

        Pairs wait in a heap, so that a long word takes n log n steps; one whose pieces were joined otherwise is passed.
        """
        pieces: list[str | None] = list(word)
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        waiting: list[tuple[int, int, tuple[str, str]]] = []

        def wait(at: int) -> None:
            if at >= 0 and after[at] < len(pieces):
                pair: Any = (pieces[at], pieces[after[at]])
                if (rank := self._ranks.get(pair)) is not None:
                    heappush(waiting, (rank, at, pair))

        for at in range(len(pieces)):
            wait(at)
        while waiting:
            _, at, pair = heappop(waiting)
            gone = after[at]
            if gone >= len(pieces) or (pieces[at], pieces[gone]) != pair:
                continue
            pieces[at], pieces[gone] = "".join(pair), None
            after[at] = after[gone]
            if after[at] < len(pieces):
                before[after[at]] = at
            wait(before[at])
            wait(at)
        return tuple(piece for piece in pieces if piece is not None)


@cache
def symbols() -> list[str]:
    """A printable character for each byte: itself where it prints, else one from 256 on, in order."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


@cache
def from_symbols() -> dict[str, int]:
    """The byte of each such character."""
    return {symbol: byte for byte, symbol in enumerate(symbols())}
