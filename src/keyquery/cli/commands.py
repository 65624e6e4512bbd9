"""The commands, each imported when it is first looked up: one of them must not wait for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from keyquery.support.plugins import commands

MODULES = {  # module of keyquery.cli by command, in the order of the help
    "look": "look",
    "compare": "look",
    "survey": "survey",
    "dial": "surgery",
    "ablate": "surgery",
    "lineage": "lineage",
    "roles": "roles",
    "attribute": "attribution",
    "wiring": "attribution",
    "causes": "causes",
    "discover": "discover",
    "flow": "flow",
    "rerank": "rerank",
    "depth": "depth",
    "monitor": "monitor",
    "prove": "prove",
}


class Commands(TyperGroup):
    """The commands of this package and of plug-ins."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        loaders = {name: partial(_own, name) for name in MODULES}
        loaders |= {name: partial(_plugin, name, load) for name, load in commands().items()}
        self.commands = OnUse({**loaders, "study": loaders.get("study", _missing)})


class OnUse(MutableMapping[str, Any]):
    """A mapping whose values are loaded when they are first looked up."""

    def __init__(self, loaders: dict[str, Callable[[], Any]]) -> None:
        self._loaders, self._loaded = loaders, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        """The value, loaded once."""
        if name not in self._loaded:
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace a value."""
        self._loaders[name], self._loaded[name] = lambda: value, value

    def __delitem__(self, name: str) -> None:
        """Remove a value."""
        del self._loaders[name]
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """Names, in order."""
        return iter(self._loaders)

    def __len__(self) -> int:
        """Number of names."""
        return len(self._loaders)


def _app() -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _own(name: str) -> Any:
    app = _app()
    app.command(name)(getattr(import_module(f"keyquery.cli.{MODULES[name]}"), name))
    return typer.main.get_command(app)


def _plugin(name: str, load: Callable[[], typer.Typer]) -> Any:
    app = _app()
    app.add_typer(load(), name=name)
    return getattr(typer.main.get_command(app), "commands")[name]  # noqa: B009  # it is a group


def _missing() -> Any:
    app = _app()
    app.command("study", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_no_studies)
    return typer.main.get_command(app)


def _no_studies() -> None:
    """Re-run published claims about attention (requires the package keyquery-studies, which is not installed)."""
    raise ImportError("studies are a separate package: pip install keyquery-studies, or ./studies of a clone")
