"""Docstrings as the reference shows them: examples as code, and the fields of result types as a table."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path
from fields import described

GROUP = re.compile(
    r"^(\*{0,2}\w+(?:, \*{0,2}\w+)+)\n((?:    .*(?:\n|\Z))+)", re.MULTILINE
)  # text, inputs: one description
PAIR = re.compile(r"(`[^`]*`)|\]\[")  # a[i][j] is no link in this house, and in backticks it is safe


class Examples(griffe.Extension):
    """Puts examples between fences, up to the next empty line, and adds the fields of classes without Parameters."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called once for each object that has been read."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, griffe.Class) and "\nParameters\n---" not in text:
            text += attributes(described(obj.source))
        obj.docstring.value = fenced(separated(text))

    def on_package(self, *, pkg: griffe.Module, **rest: Any) -> None:
        """Called once a package has been read: defaults that are constants are shown by their values."""
        waiting: list[Any] = [pkg]
        while waiting:
            each = waiting.pop()
            waiting += [member for member in each.members.values() if not member.is_alias]
            for parameter in each.parameters if isinstance(each, griffe.Function) else ():
                if isinstance(parameter.default, griffe.ExprName):
                    parameter.default = constant(pkg, parameter.default)


def constant(pkg: griffe.Module, name: griffe.ExprName) -> Any:
    """The literal that a constant of the package holds, as source; the name itself where it holds none."""
    try:
        value = pkg.modules_collection[name.canonical_path].value
        return value if isinstance(ast.literal_eval(str(value)), (int, float, str)) else name
    except (KeyError, ValueError, SyntaxError, AttributeError, griffe.GriffeError):
        return name


def attributes(fields: dict[str, str]) -> str:
    """The section of a docstring that describes fields; empty without any.

    >>> attributes({"rank": "of the layer"})
    '\\n\\nAttributes\\n----------\\nrank\\n    of the layer\\n'
    """
    rows = "".join(f"{name}\n    {text}\n" for name, text in fields.items() if text)
    return f"\n\nAttributes\n----------\n{rows}" if rows else ""


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
