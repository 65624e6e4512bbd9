"""Make text from untrusted files safe and short for a terminal."""

from __future__ import annotations

import codecs
import sys
import unicodedata
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any, TypeVar

D = TypeVar("D")
NAME = 80  # characters of a name within a message of the library
BRIEF, REPR = 60, 240  # characters of a value within a repr, and of the whole repr
WORD, TEXT, MESSAGE = 240, 400, 2000  # characters of a word in any message, of a text in a reading, of a whole message
# ASCII replacements of the symbols that reports use, for terminals that lack them; parts of bars stay distinct.
ASCII = {
    "█": "#", "▓": "=", "▒": "-", "▞": "/", "░": ".", "…": "...", "–": "-", "—": "-", "−": "-", "→": "->", "←": "<-",
    "×": "x", "·": ".", "±": "+-", "≥": ">=", "≤": "<=", "²": "^2", "³": "^3", "‖": "||", "’": "'", "‘": "'", "“": '"',
    "↔": "<->", "”": '"', "√": "sqrt", "Δ": "delta", "Σ": "sum",
}  # fmt: skip


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def printable(text: str, most: int | None = None) -> str:
    r"""Text as one line that is safe for a terminal; if longer than `most` characters, its middle is cut out.

    Control characters (C0, C1), line ends, bidirectional overrides, surrogates and other invisible characters are
    escaped as in Python.
    """
    if not text.isprintable():
        text = "".join(map(_visible, text))
    if most is None or len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def message(text: str) -> str:
    """An error message for the terminal: one line, with long words and the whole shortened."""
    return printable(" ".join(printable(word, WORD) for word in text.split()), MESSAGE)


def brief(value: Any) -> str:
    """The repr of a value on one line; of a long list or mapping, the number of items."""
    text = " ".join(repr(value).split())
    if len(text) > BRIEF and isinstance(value, (list, tuple, dict)):
        return f"{{… {len(value)}}}" if isinstance(value, dict) else f"[… {len(value)}]"
    return printable(text, BRIEF)


def printable_data(value: Any, most: int | None = None) -> Any:
    """Plain data, as in a Reading, with every string in it made printable."""
    if isinstance(value, str):
        return printable(value, most)
    if isinstance(value, Mapping):
        return {printable_data(key, most): printable_data(item, most) for key, item in value.items()}
    if isinstance(value, list) and not set(map(type, value)) <= {float, int}:  # skips long spectra
        return [printable_data(item, most) for item in value]
    return value


def printable_copy(record: D, most: int | None = None) -> D:
    """A copy of a dataclass of plain data, such as a Reading, with every string in it made printable."""
    shown = copy(record)
    for entry in fields(record):  # type: ignore[arg-type]
        object.__setattr__(shown, entry.name, printable_data(getattr(record, entry.name), most))
    return shown


def spell_out() -> None:
    """Make standard output and error write characters that their encoding lacks in ASCII, instead of raising."""
    codecs.register_error("keyquery", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="keyquery")


def _visible(sign: str) -> str:
    if sign.isprintable():
        return sign
    if unicodedata.category(sign) == "Zs":  # spaces of other widths
        return " "
    return sign.encode("unicode_escape", "backslashreplace").decode()


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs), error.end


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
