"""The reference of the command line, made of the commands themselves when the site is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

from keyquery.cli.commands import GROUPS, load

HEAD = """# Command line

Generated from the commands: `keyquery COMMAND --help` prints the same. Errors are one sentence on stderr with exit
code 2, an interrupt is exit code 130. Existing files are replaced only with `--force`.
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds cli.md."""
    files.append(File.generated(config, "cli.md", content=page()))
    return files


def page() -> str:
    """All commands, those of groups after the others."""
    commands = {name: load(name) for group in GROUPS.values() for name in group}
    simple = {name: command for name, command in commands.items() if not hasattr(command, "commands")}
    groups = {name: command for name, command in commands.items() if name not in simple}
    blocks = [HEAD, *(section(f"keyquery {name}", simple[name]) for name in sorted(simple))]
    for group, command in sorted(groups.items()):
        blocks += [section(f"keyquery {group} {name}", each) for name, each in sorted(command.commands.items())]
    return "\n".join(blocks)


def section(title: str, command: Any) -> str:
    """Usage, description, and a table of arguments and options."""
    named = [(each.name.upper(), each.required) for each in command.params if each.param_type_name == "argument"]
    usage = [name if required else f"[{name}]" for name, required in named]
    lines = [f"## {title}\n", f"    {' '.join([title, *usage])} [OPTIONS]\n", paragraphs(command.help or "")]
    rows = list(rows_of(command))
    return "\n".join([*lines, "| | | default |\n|---|---|---|", *rows, ""])


def rows_of(command: Any) -> Iterator[str]:
    """One row per parameter: its name, what it is, and its default."""
    for each in command.params:
        named = " ".join(f"`{name}`" for name in each.opts if name.startswith("-")) or f"`{each.name.upper()}`"
        value = each.default if not callable(each.default) else None
        shown = "" if value is None or value is False else f"`{value}`"
        text = re.sub(r"\s+", " ", getattr(each, "help", None) or "")
        yield f"| {named} | {escaped(text)} | {escaped(shown)} |"


def paragraphs(text: str) -> str:
    """A docstring as Markdown."""
    return "\n\n".join(escaped(" ".join(block.split())) for block in text.strip().split("\n\n")) + "\n"


def escaped(text: str) -> str:
    """Text that a Markdown table keeps as it is."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
