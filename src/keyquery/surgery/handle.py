"""An undoable change to a live model."""

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
    """A property that returns a handle's own `__enter__`, and is callable when looked up on the class.

    A `with` statement binds it; `ExitStack.enter_context` calls it with the handle.
    """

    def __call__(self, handle: Handle) -> Any:
        return self.__get__(handle)()


class Handle:
    """Undoes a change by `.undo()`, or as a context manager at its end, also after an exception.

    >>> layer = torch.nn.Linear(2, 2)
    >>> with ExitStack() as changes:  # an error in here undoes the changes so far
    ...     put(layer, "bias", None, changes)
    ...     handle = Handle(changes, "the bias")
    >>> layer.bias is None, handle.undo(), layer.bias is None
    (True, None, False)
    """

    if TYPE_CHECKING:

        def __enter__(self: H) -> H: ...
    else:
        # Runs entirely in C: an interrupt in Python code could fall between the change and the block that undoes it.
        __enter__ = _Entry(attrgetter("_enter"))

    def __init__(self, changes: ExitStack, what: str) -> None:
        self._changes: ExitStack | None = changes.pop_all()
        self.what = what
        self.model: nn.Module | None = None
        self._unentered = iter([ref(self)])  # exhausted when a block begins
        self._enter: Callable[[], Any] = partial(next, map(call, self._unentered))

    def undo(self) -> None:
        """Restore the model bit for bit; waits while another thread uses it."""
        self.require()
        if self.model is None:
            self._close()
        else:
            with temporarily(self.model, foreign=True):
                self._close()

    def _close(self) -> None:
        with uninterrupted():
            changes, self._changes, self.model = self._changes, None, None
            self._enter = partial(_raise_undone, self.what)
            if changes is not None:
                changes.close()

    def __repr__(self) -> str:
        return f"<{self.what}{', undone' if self.undone else ''}>"

    @property
    def undone(self) -> bool:
        """Whether the change was undone."""
        return self._changes is None

    def require(self) -> None:
        """Raise if the change is already undone."""
        if self.undone:
            _raise_undone(self.what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.undone:
                self.undo()
        finally:  # again, for an interrupt before signals were deferred
            if not self.undone:
                self.undo()

    def __del__(self) -> None:
        """Undo if an interrupt ended a block before the first line of `__exit__`."""
        if not self.undone and length_hint(self._unentered) == 0:
            self.undo()


def _raise_undone(what: str) -> None:
    raise RuntimeError(f"{what} is already undone")


def lasting(model: nn.Module, change: Callable[[ExitStack], H]) -> H:
    """Change a model atomically: after an error or an interrupt nothing is changed. Returns the handle.

    `change` pushes its undo on the stack that it gets, and returns a handle for it.

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
    handles: list[H] = []
    try:
        with alone(model), uninterrupted():
            with ExitStack() as changes:
                handles.append(change(changes))
            handles[0].model = model
        return handles[0]
    except BaseException:
        if handles and not handles[0].undone:
            handles[0].undo()
        raise


def put(owner: Any, name: str, value: Any, changes: ExitStack) -> None:
    """Set owner.name = value, with the undo in `changes`; an instance attribute hides one of its class."""
    tables = [getattr(owner, kind, {}) for kind in ("_parameters", "_buffers", "_modules")] + [vars(owner)]
    table = next((table for table in tables if name in table), None)
    if table is None:
        changes.callback(vars(owner).pop, name, None)
        vars(owner)[name] = value
    else:
        changes.callback(table.__setitem__, name, table[name])  # keeps the order of entries
        table[name] = value


def check_model(model: nn.Module) -> nn.Module:
    """The bare model; raises for meta weights, active dropout, or anything that is not a module."""
    model = bare(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("the model is on the meta device: load its weights first")
    dropping = [name for name, module in model.named_modules() if module.training and _rate(module) > 0]
    if dropping:
        raise ValueError(f"{dropping[0] or 'the model'} is in training mode with dropout: call model.eval() first")
    return model


def _rate(module: nn.Module) -> float:
    """The dropout rate of a module; many attention modules store it as a number."""
    if isinstance(module, nn.Dropout):
        return module.p
    rate = getattr(module, "attention_dropout", getattr(module, "dropout", 0.0))
    return rate if isinstance(rate, (int, float)) else 0.0
