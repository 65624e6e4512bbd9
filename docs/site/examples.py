"""Docstrings of this house are plain text with examples; the reference sets the examples apart as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

GROUP = re.compile(
    r"^(\*{0,2}\w+(?:, \*{0,2}\w+)+)\n((?:    .*(?:\n|\Z))+)", re.MULTILINE
)  # text, inputs: one description
PAIR = re.compile(r"(`[^`]*`)|\]\[")  # a[i][j] is no link in this house, and in backticks it is safe


class Examples(griffe.Extension):
    """Puts every run of lines that begins with `>>>` between fences, up to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called once for each object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(separated(obj.docstring.value))


def separated(text: str) -> str:
    """A docstring whose parameters stand alone: those of a group would all get the type of its first.

    >>> separated("text, inputs\\n    What to run on.\\n")
    'text\\n    What to run on.\\ninputs\\n    What to run on.\\n'
    """
    return GROUP.sub(lambda group: "".join(f"{name}\n{group[2].rstrip()}\n" for name in group[1].split(", ")), text)


def fenced(text: str) -> str:
    """A docstring whose examples Markdown takes as code, and not as quotes of quotes of quotes."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.startswith(">>>"):
            lines.extend(["", "```pycon"])
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line if inside else PAIR.sub(lambda found: found[1] or r"]\[", line))
    return "\n".join([*lines, "```"] if inside else lines)
