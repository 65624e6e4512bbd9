"""A change to a live model, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import attrgetter, call, length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from torch import nn

from keyquery.capture.guard import alone, temporarily, uninterrupted
from keyquery.checkpoints.sources import bare

H = TypeVar("H", bound="Handle")


class _Entry(property):
    """A property that gives a handle's own way in, and is one itself where it is taken off the class.

    A `with` statement binds what it finds; `ExitStack.enter_context` calls it with the handle.
    """

    def __call__(self, handle: Handle) -> Any:
        return self.__get__(handle)()


class Handle:
    """What undoes a change. It is a context, too: at its end, also after an exception, the change is undone.

    >>> layer = torch.nn.Linear(2, 2)
    >>> with ExitStack() as changes:  # whatever goes wrong in here undoes what was done so far
    ...     put(layer, "bias", None, changes)
    ...     handle = Handle(changes, "the bias")
    >>> layer.bias is None, handle.undo(), layer.bias is None
    (True, None, False)
    """

    if TYPE_CHECKING:

        def __enter__(self: H) -> H: ...
    else:
        # In C throughout: an interrupt on a line of Python would fall between the change and the block that undoes it.
        __enter__ = _Entry(attrgetter("_enter"))

    def __init__(self, changes: ExitStack, what: str) -> None:
        self._changes: ExitStack | None = changes.pop_all()
        self.what = what
        self.model: nn.Module | None = None
        self._unentered = iter([ref(self)])  # used up when a block begins, which gets the handle that it holds
        self._enter: Callable[[], Any] = partial(next, map(call, self._unentered))

    def undo(self) -> None:
        """Give the model back as it was, bit for bit; where another thread uses it, after that."""
        self.require()
        if self.model is None:
            self._close()
        else:
            with temporarily(self.model, foreign=True):
                self._close()

    def _close(self) -> None:
        with uninterrupted():
            changes, self._changes, self.model = self._changes, None, None
            self._enter = partial(_refuse, self.what)
            if changes is not None:
                changes.close()

    def __repr__(self) -> str:
        return f"<{self.what}{', undone' if self.undone else ''}>"

    @property
    def undone(self) -> bool:
        """Whether the change was taken back."""
        return self._changes is None

    def require(self) -> None:
        """Refuse to go on with what is undone."""
        if self.undone:
            _refuse(self.what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.undone:
                self.undo()
        finally:  # once more, for an interrupt that came before signals were held
            if not self.undone:
                self.undo()

    def __del__(self) -> None:
        """A block that an interrupt ended before the first line of `__exit__` undoes its change here."""
        if not self.undone and length_hint(self._unentered) == 0:
            self.undo()


def _refuse(what: str) -> None:
    raise RuntimeError(f"{what} is undone already")


def lasting(model: nn.Module, change: Callable[[ExitStack], H]) -> H:
    """Change a model, all of it or, after an error or an interrupt, nothing of it; the handle undoes it.

    `change` puts the way back on the stack that it is given, and makes the handle of it.

    >>> layer = torch.nn.Linear(2, 2)
    >>> def change(changes):
    ...     put(layer, "bias", None, changes)
    ...     return Handle(changes, "the bias")
    >>> with lasting(layer, change):
    ...     print(layer.bias)
    None
    >>> layer.bias is None
    False
    """
    made: list[H] = []
    try:
        with alone(model), uninterrupted():
            with ExitStack() as changes:
                made.append(change(changes))
            made[0].model = model
        return made[0]
    except BaseException:
        if made and not made[0].undone:
            made[0].undo()
        raise


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


def check_model(model: nn.Module) -> nn.Module:
    """The bare model; refused is what cannot be operated on: no module, weights that are nowhere, dropout at work."""
    model = bare(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("the model is on `meta`: it has no weights yet; load them first")
    dropping = [name for name, module in model.named_modules() if module.training and _rate(module) > 0]
    if dropping:
        raise ValueError(f"{dropping[0] or 'the model'} is in training with dropout: call model.eval() first")
    return model


def _rate(module: nn.Module) -> float:
    """How much a module drops: many attention modules keep it as a number."""
    if isinstance(module, nn.Dropout):
        return module.p
    rate = getattr(module, "attention_dropout", getattr(module, "dropout", 0.0))
    return rate if isinstance(rate, (int, float)) else 0.0
