"""A change to a live model, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

H = TypeVar("H", bound="Handle")


class Handle:
    """What undoes a change. It is a context, too: at its end, also after an exception, the change is undone.

    >>> layer = torch.nn.Linear(2, 2)
    >>> with ExitStack() as changes:  # whatever goes wrong in here undoes what was done so far
    ...     put(layer, "bias", None, changes)
    ...     handle = Handle(changes, "the bias")
    >>> layer.bias is None, handle.undo(), layer.bias is None
    (True, None, False)
    """

    def __init__(self, changes: ExitStack, what: str) -> None:
        self._changes: ExitStack | None = changes.pop_all()
        self.what = what

    def undo(self) -> None:
        """Give the model back as it was, bit for bit."""
        self.require()
        assert self._changes is not None
        changes, self._changes = self._changes, None
        changes.close()

    def __repr__(self) -> str:
        return f"<{self.what}{', undone' if self.undone else ''}>"

    @property
    def undone(self) -> bool:
        """Whether the change was taken back."""
        return self._changes is None

    def __enter__(self: H) -> H:
        self.require()
        return self

    def require(self) -> None:
        """Refuse to go on with what is undone."""
        if self.undone:
            raise RuntimeError(f"{self.what} is undone already")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.undone:
            self.undo()


def put(owner: Any, name: str, value: Any, changes: ExitStack) -> None:
    """owner.name = value, with the way back in `changes`; an instance's own attribute hides one of its class."""
    places = [getattr(owner, kind, {}) for kind in ("_parameters", "_buffers", "_modules")] + [vars(owner)]
    place = next((place for place in places if name in place), None)
    if place is None:
        changes.callback(vars(owner).pop, name, None)
        vars(owner)[name] = value
    else:
        changes.callback(place.__setitem__, name, place[name])  # in its old place among the others
        place[name] = value


_HELD: dict[Hashable, tuple[int, Callable[[], Any]]] = {}


def hold(key: Hashable, begin: Callable[[], Callable[[], Any]], changes: ExitStack) -> None:
    """Something that several changes share: the first begins it, the last one to be undone takes it back.

    `begin` does it, and gives what undoes it.
    """
    count, back = _HELD[key] if key in _HELD else (0, begin())
    _HELD[key] = count + 1, back
    changes.callback(_let_go, key)


def _let_go(key: Hashable) -> None:
    count, back = _HELD.pop(key)
    if count == 1:
        back()
    else:
        _HELD[key] = count - 1, back


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be operated on: no module, weights that are nowhere, dropout at work."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a live torch.nn.Module, got {type(model).__name__}")
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("the model is on `meta`: it has no weights yet; load them first")
    dropping = [name for name, module in model.named_modules() if module.training and _rate(module) > 0]
    if dropping:
        raise ValueError(f"{dropping[0] or 'the model'} is in training with dropout: call model.eval() first")


def _rate(module: nn.Module) -> float:
    """How much a module drops: many attention modules keep it as a number."""
    if isinstance(module, nn.Dropout):
        return module.p
    rate = getattr(module, "attention_dropout", getattr(module, "dropout", 0.0))
    return rate if isinstance(rate, (int, float)) else 0.0
