"""torch's attention functions, heard where they are called by their names in torch's modules.

A torch function mode hears every function of torch, a hundred per attention layer, which costs more than all else that
a record does. Nearly all models look attention up by its name, where another function can stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.nn import functional

FUSED, SOFTMAX = "scaled_dot_product_attention", "softmax"
# Not Tensor.softmax: a change of the class empties Python's cache of the methods of all tensors.
PLACES: tuple[tuple[Any, str], ...] = ((functional, FUSED), (functional, SOFTMAX), (torch, SOFTMAX))


class Listener(Protocol):
    """Whoever is notified of calls."""

    def called(self, name: str, args: Any, kwargs: Any) -> None:
        """Before a call."""

    def returned(self) -> None:
        """After it, also if it failed."""


class NamedCalls:
    """While it is entered, calls of attention by its names, from this thread, are reported to a listener."""

    def __init__(self, listener: Listener) -> None:
        self._entry = get_ident(), listener

    def __enter__(self) -> NamedCalls:
        _LISTENERS.append(self._entry)
        _install()
        return self

    def __exit__(self, *error: Any) -> None:
        _LISTENERS.remove(self._entry)
        if not _LISTENERS:
            _remove()


_LISTENERS: list[tuple[int, Listener]] = []
_REPLACED: list[tuple[Any, str, Any]] = []  # what stood in the places


def _install() -> None:
    if not _REPLACED:
        for place, name in PLACES:
            _REPLACED.append((place, name, getattr(place, name)))
            setattr(place, name, _wrapped(place, name, getattr(place, name)))


def _remove() -> None:
    while _REPLACED:
        setattr(*_REPLACED.pop())


def _wrapped(place: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        listeners = [listener for of, listener in _LISTENERS if of == thread]
        if not listeners:
            return function(*args, **kwargs)
        for listener in listeners:
            listener.called(name, args, kwargs)
        setattr(place, name, function)  # function modes that compare what is called with the name find it there
        try:
            return function(*args, **kwargs)
        finally:
            if _REPLACED:
                setattr(place, name, call)
            for listener in listeners:
                listener.returned()

    return call
