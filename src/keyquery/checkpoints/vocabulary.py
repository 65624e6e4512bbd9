"""The words of a checkpoint's tokens, from the files that lie beside it, or from within."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keyquery.checkpoints import gguf
from keyquery.checkpoints.sources import read_json
from keyquery.checkpoints.tokenizer import from_symbols


def vocabulary(path: str | Path) -> list[str] | None:
    """Token texts by id: tokenizer.json, vocab.json or vocab.txt beside the weights, or a GGUF file's own, or None."""
    if Path(path).suffix == ".gguf" and Path(path).is_file():
        return gguf.words(Path(path))
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if (folder / "tokenizer.json").is_file():
        facts = read_json(folder / "tokenizer.json")
        words = _by_id(facts.get("model", {}).get("vocab"))
        return [readable(word) for word in words or []] or None
    if (folder / "vocab.json").is_file():
        return [readable(word) for word in _by_id(read_json(folder / "vocab.json")) or []] or None
    if (folder / "vocab.txt").is_file():
        return (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return None


def readable(token: str) -> str:
    """A token as people read it: bytes as their text, a leading space as ▁.

    >>> readable("ĠcafÃ©"), readable("##ing"), readable("▁the")
    ('▁café', '##ing', '▁the')
    """
    table = from_symbols()
    if not all(symbol in table for symbol in token):
        return token
    try:
        text = bytes(table[symbol] for symbol in token).decode()
    except UnicodeDecodeError:
        return token
    return text.replace(" ", "▁").replace("\n", "⏎")


def _by_id(words: Any) -> list[str] | None:
    """A vocabulary as {text: id} or as [[text, score], …], in the order of ids."""
    if isinstance(words, list):
        return [str(word[0]) if isinstance(word, list) and word else str(word) for word in words]
    if not isinstance(words, dict) or not all(isinstance(number, int) for number in words.values()):
        return None
    texts = {number: text for text, number in words.items()}
    return [texts.get(number, f"#{number}") for number in range(max(texts, default=-1) + 1)]
