"""The words of a checkpoint's tokens, from the files that lie beside it, or from within."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keyquery.checkpoints.formats import gguf
from keyquery.checkpoints.hub import located
from keyquery.checkpoints.sources import read_json
from keyquery.checkpoints.tokenizer import from_symbols
from keyquery.support.files import beside, read_text

HOLES = 100_000  # ids that may have no token: a single large one must not make a long list


def vocabulary(path: str | Path) -> list[str] | None:
    """Token texts by id: tokenizer.json, vocab.json or vocab.txt beside the weights, or a GGUF file's own, or None."""
    path = located(path)
    if path.suffix == ".gguf" and path.is_file():
        return _readable(gguf.words(path))
    folder = path if path.is_dir() else path.parent
    if (file := beside(folder, "tokenizer.json")).is_file():
        model = read_json(file).get("model")
        return _readable(_by_id(model.get("vocab"))) if isinstance(model, dict) else None
    if (file := beside(folder, "vocab.json")).is_file():
        return _readable(_by_id(read_json(file)))
    if (file := beside(folder, "vocab.txt")).is_file():
        return read_text(file).splitlines()
    return None


def _readable(words: list[str] | None) -> list[str] | None:
    """Byte-level vocabularies, which write a space as Ġ, as their texts; any other as it is."""
    if words is None or not any(word.startswith("Ġ") for word in words):
        return words
    return [readable(word) for word in words]


def readable(token: str) -> str:
    """A token of bytes as people read it: its text, a leading space as ▁, and parts of characters as their bytes."""
    table = from_symbols()
    if not all(symbol in table for symbol in token):
        return token
    try:
        text = bytes(table[symbol] for symbol in token).decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{table[symbol]:02X}>" for symbol in token)
    return text.replace(" ", "▁").replace("\n", "⏎")


def _by_id(words: Any) -> list[str] | None:
    """A vocabulary as {text: id} or as [[text, score], …], in the order of ids."""
    if isinstance(words, list):
        return [str(word[0]) if isinstance(word, list) and word else str(word) for word in words]
    if not isinstance(words, dict) or not all(isinstance(number, int) for number in words.values()):
        return None
    texts = {number: text for text, number in words.items()}
    if max(texts, default=0) > len(texts) + HOLES:
        raise ValueError(f"a vocabulary of {len(texts)} tokens cannot have the id {max(texts)}")
    return [texts.get(number, f"#{number}") for number in range(max(texts, default=-1) + 1)]
