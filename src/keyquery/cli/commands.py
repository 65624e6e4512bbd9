"""The commands by group; the module of a command is imported when the command runs, for it may import torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from keyquery.support.plugins import commands as plugins

# Groups of the help, each with its commands: their module in keyquery.cli, and the first sentence of their help.
GROUPS = {
    "See a model": {
        "look": ("look", "Show the QK circuit of every head: symmetric, skew, popularity and position parts."),
        "roles": ("roles", "Which heads copy? Score every head as previous-token, induction, retrieval, sink, …"),
        "attribute": ("attribution", "Show why a head attends from one token to another: its score by source."),
        "wiring": ("attribution", "Show which earlier heads and MLPs feed the queries and keys of every head."),
        "flow": ("flow", "Measure how much attention flows between image and text, or between two texts."),
        "causes": ("causes", "Infer a causal graph over the words of a text from a model's attention."),
    },
    "Change it": {
        "dial": ("surgery", "Scale parts of a model's attention scores, and show its loss and output."),
        "ablate": (
            "surgery",
            "What would it cost? The loss without parts of heads, or with other changes, for all heads.",
        ),
    },
    "Many models": {
        "compare": ("look", "Show what differs between two models, or between two checkpoints of one."),
        "lineage": ("lineage", "Is one model made from another? Compare the spectra and QK forms of all heads."),
        "survey": ("survey", "Run look on many checkpoints, and report how heads change with training and size."),
    },
    "Learn from data": {
        "discover": ("discover", "Infer a causal graph over the columns of a table, allowing for hidden causes."),
        "rerank": ("rerank", "Re-rank the top of retrieval lists by how similar candidates are to the same items."),
        "depth": ("depth", "How deep should a Transformer be? Apply a published law to a budget or a shape."),
        "monitor": ("monitor", "Watch a training run: attention logits of every head, and alarms."),
    },
    "For developers": {
        "prove": (
            "prove",
            "Test whether a model type, or a folder's config, is read exactly, on a tiny random model of it.",
        ),
        "study": ("", "Re-run published claims about attention (requires the package keyquery-studies)."),
    },
}
MODULES = {name: module for group in GROUPS.values() for name, (module, _) in group.items() if module}


class Commands(TyperGroup):
    """Lists the commands of this package and of plug-ins without their modules, and loads the one that runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        groups = {name: (group, text) for group, members in GROUPS.items() for name, (_, text) in members.items()}
        others = {name: ("Plug-ins", "A command of another package.") for name in plugins() if name not in groups}
        self.commands = {
            name: TyperCommand(name, help=text, rich_help_panel=group)
            for name, (group, text) in {**groups, **others}.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The name, the command that runs, and its arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group, each with its summary."""
        listed: list[tuple[str, Any]] = list(self.commands.items())
        for group in dict.fromkeys(command.rich_help_panel for _, command in listed):
            with formatter.section(group):
                formatter.write_dl(
                    [(name, command.help) for name, command in listed if command.rich_help_panel == group]
                )


@cache
def load(name: str) -> Any:
    """A command, from its module or its plug-in."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    with _leaving_on_interrupt():
        if name in plugins():
            app.add_typer(plugins()[name](), name=name)
            return getattr(typer.main.get_command(app), "commands")[name]  # noqa: B009  # it is a group
        if name == "study":
            raise ImportError("studies are a separate package: pip install keyquery-studies, or ./studies of a clone")
        app.command(name)(getattr(import_module(f"keyquery.cli.{MODULES[name]}"), name))
        return typer.main.get_command(app)


@contextmanager
def _leaving_on_interrupt() -> Iterator[None]:
    """End at an interrupt while modules are imported: some of them swallow exceptions, interrupts among them."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not where interrupts are ignored, as under nohup
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def leave(*_: object) -> None:
    """End the process. Where the interrupt came inside of `exec`, Python would die of the signal, not exit."""
    print("keyquery: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
