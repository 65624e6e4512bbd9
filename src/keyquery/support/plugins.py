"""Plug-ins: other packages that add commands, and kinds of readings with their displays.

A package registers them by entry points: in the group `keyquery.commands` a typer application per command, in the group
`keyquery.plugins` a module with `KINDS` (kind → module of its class) and `SHOWS` (kind → module of its displays).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

_REGISTERED: list[ModuleType] = []


def register(plugin: ModuleType) -> None:
    """Add a plug-in that is not installed, such as one that runs from its source tree."""
    if plugin not in _REGISTERED:
        _REGISTERED.append(plugin)


def plugins() -> list[ModuleType]:
    """Modules with `KINDS` and `SHOWS`, from installed packages and from `register`."""
    return list(dict.fromkeys([*_installed(), *_REGISTERED]))


def commands() -> dict[str, Callable[[], Any]]:
    """What loads the typer applications of installed packages, by command name."""
    return {entry.name: entry.load for entry in entry_points(group="keyquery.commands")}


@cache
def _installed() -> tuple[ModuleType, ...]:
    return tuple(entry.load() for entry in entry_points(group="keyquery.plugins"))
