"""Byte-level pair encoding out of a tokenizer.json, by the library that wrote it, from the parts that are known."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from keyquery.checkpoints.sources import read_json
from keyquery.support.extras import optional
from keyquery.support.files import beside, write_text

# Words with the space before them, single digits, runs of signs, runs of blanks.
PATTERN = r" ?[^\W\d_]+| ?\d| ?(?:[^\w\s]|_)+|\s+"
RUNS = re.compile(r"\S++|\s++")
LONGEST = 1_000_000  # characters of a word


class Tokenizer:
    """Text to token ids and back, for files whose model is BPE over bytes and whose words one pattern finds.

    That is what the models that ship use. Called like a tokenizer of transformers; texts are data, no special token is
    ever read out of them. Needs the extra `hf`.
    """

    is_fast = False

    def __init__(self, facts: dict[str, Any]) -> None:
        try:
            self._take(facts)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"this tokenizer.json is not whole: {type(error).__name__}: {error}") from None

    def _take(self, facts: dict[str, Any]) -> None:
        model, steps = facts["model"], (facts.get("pre_tokenizer") or {}).get("pretokenizers") or []
        patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
        # Other patterns are not run: a regular expression of an untrusted file may take forever.
        if model.get("type") != "BPE" or patterns != [PATTERN] or steps[-1]["type"] != "ByteLevel":
            raise ValueError("this tokenizer.json is not byte-level BPE with keyquery's pattern; it needs transformers")
        self.facts = facts
        self.vocabulary: dict[str, int] = dict(model["vocab"])
        if not all(isinstance(number, int) and 0 <= number < 2**32 for number in self.vocabulary.values()):
            raise ValueError("this tokenizer.json is not whole: ids must be numbers from 0")
        absent = [symbol for symbol in symbols() if symbol not in self.vocabulary]
        if absent:
            raise ValueError(f"this tokenizer.json is not whole: it has no token {absent[0]!r}, which is a byte")
        pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
        # A merge whose result is no token would make pieces without an id.
        known = [(one, other) for one, other in pairs if {one, other, one + other} <= self.vocabulary.keys()]
        self._library = byte_level(self.vocabulary, known)
        special = {token["content"]: token["id"] for token in facts.get("added_tokens", [])}
        self.pad_token_id, self.mask_token_id = special.get("[PAD]"), special.get("[MASK]")
        self._texts = {number: text for text, number in self.vocabulary.items()}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder, or of a tokenizer.json."""
        path = Path(path)
        return cls(read_json(beside(path, "tokenizer.json") if path.is_dir() else path))

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json."""
        write_text(Path(folder) / "tokenizer.json", json.dumps(self.facts, ensure_ascii=False))

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids of a text, under the name that models take them by."""
        return {"input_ids": self.encode(text)}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        longest = max((run.end() - run.start() for run in RUNS.finditer(text)), default=0) if len(text) > LONGEST else 0
        if longest > LONGEST:  # the library takes a hundred bytes for each of its characters
            raise ValueError(f"the text holds a word of {longest} characters; at most {LONGEST} are encoded")
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; what is no whole character becomes a replacement sign."""
        return str(self._library.decode([n for n in ids if n not in (self.pad_token_id, self.mask_token_id)]))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Each token as it is stored."""
        return [self._texts[number] for number in ids]


def byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """The library's tokenizer of a vocabulary and merges; nothing else of a file reaches it."""
    library = optional("tokenizers", "a tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, merges))
    steps = library.pre_tokenizers
    words = steps.Split(library.Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = steps.Sequence([words, steps.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


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
