"""Changes to a live model that neither an interrupt nor another thread can split.

Python delivers signals to its main thread between two bytecodes: one between a change and the registration of its undo
would leave the model changed. So signals are deferred during the few lines that change or restore a model.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from keyquery.capture.transformers_attention import configs_of

Change = Callable[[ExitStack], Any]  # makes a change, and pushes its undo on the stack

PAUSE = 0.002  # seconds between attempts to acquire a model in use by another thread
_SIGNALS = signal.valid_signals()
_CHANGES = threading.RLock()  # one change at a time: models may share modules, configs and global flags
_USED: dict[int, tuple[int, int]] = {}  # id of a model part in use: thread and nesting depth
_CLAIMED: dict[int, tuple[int, int]] = {}  # likewise, for models with a lasting change
_SHARED: dict[Hashable, tuple[int, Callable[[], Any]]] = {}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context that defers Python signal handlers and changes by other threads; for a few lines only.

    >>> import signal
    >>> try:
    ...     with uninterrupted():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("whole")
    ... except KeyboardInterrupt:
    ...     print("and then interrupted")
    whole
    and then interrupted
    """
    if threading.current_thread() is not threading.main_thread():
        with _CHANGES:
            yield
        return
    waiting: list[int] = []
    before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}

    def wait(number: int, frame: Any) -> None:
        waiting.append(number)

    try:
        try:
            for number in before:
                signal.signal(number, wait)
            with _CHANGES:
                yield
        finally:
            _handle(before)
    finally:  # again, for a signal between those two lines, or before all handlers were set
        _handle(before)
        _deliver(waiting)


def _handle(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _deliver(numbers: list[int]) -> None:
    """Raise the deferred signals; an exception from one does not drop the others."""
    try:
        if numbers:
            signal.raise_signal(numbers.pop(0))
    finally:
        if numbers:
            _deliver(numbers)


@contextmanager
def temporarily(model: nn.Module, *changes: Change, foreign: bool = False) -> Iterator[None]:
    """Context with exclusive use of the model and temporary `changes`, which are always undone at the end.

    Other threads wait. A model that another thread has dialled, projected or ablated is rejected, unless `foreign`,
    which is for undoing that.

    >>> layer = torch.nn.Linear(1, 1)
    >>> with temporarily(layer, lambda stack: stack.callback(layer.train, layer.training) and layer.eval()):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    stack = ExitStack()
    try:
        try:
            _take(model, stack, foreign)
            with uninterrupted():
                for change in changes:
                    change(stack)
            yield
        finally:
            _close(stack)
    finally:  # again, for an interrupt before signals were deferred; closing twice is harmless
        _close(stack)


def alone(model: nn.Module) -> Any:
    """Context with exclusive use of the model: other threads wait.

    >>> with alone(torch.nn.Linear(1, 1)):
    ...     pass
    """
    return temporarily(model)


def unchanged(source: Any) -> Any:
    """Context of several steps between which no other thread changes a live model; of anything else, an empty one.

    Each step checks by itself whether another thread has dialled, projected or ablated the model.

    >>> with unchanged("model.safetensors"):
    ...     pass
    """
    return temporarily(source, foreign=True) if isinstance(source, nn.Module) else nullcontext()


def put_back(model: nn.Module) -> Any:
    """Context that restores the attention implementations named in a model's configs.

    >>> with put_back(torch.nn.Linear(2, 2)):
    ...     pass
    """

    def note(stack: ExitStack) -> None:
        for config in configs_of(model):
            name = "_attn_implementation_internal"
            stack.callback(setattr, config, name, getattr(config, name))

    return temporarily(model, note)


def _close(stack: ExitStack) -> None:
    with uninterrupted():
        stack.close()


def _take(model: nn.Module, stack: ExitStack, foreign: bool) -> None:
    me = threading.get_ident()
    while True:
        with uninterrupted():
            parts = [*model.modules(), *configs_of(model)]
            if not foreign and any(_CLAIMED.get(id(part), (me,))[0] != me for part in parts):
                raise RuntimeError("another thread has dialled, projected or ablated this model: undo that first")
            if all(_USED.get(id(part), (me,))[0] == me for part in parts):
                _count(_USED, parts, stack)
                return
        time.sleep(PAUSE)


def claim(model: nn.Module, changes: ExitStack) -> None:
    """Mark a lasting change by this thread: until it is undone, other threads cannot use the model."""
    _count(_CLAIMED, [*model.modules(), *configs_of(model)], changes)


def _count(counts: dict[int, tuple[int, int]], parts: list[Any], stack: ExitStack) -> None:
    """Increment the count of every part; the stack keeps references, so that ids stay valid."""
    me = threading.get_ident()
    for part in parts:
        counts[id(part)] = me, counts.get(id(part), (me, 0))[1] + 1
    stack.callback(_uncount, counts, parts)


def _uncount(counts: dict[int, tuple[int, int]], parts: list[Any]) -> None:
    for part in parts:
        thread, count = counts.pop(id(part))
        if count > 1:
            counts[id(part)] = thread, count - 1


def hold(key: Hashable, begin: Callable[[], Callable[[], Any]], changes: ExitStack) -> None:
    """A reference-counted change shared by several others: made by the first, undone with the last.

    `begin` makes it, and returns its undo.
    """
    count, back = _SHARED[key] if key in _SHARED else (0, begin())
    _SHARED[key] = count + 1, back
    changes.callback(_let_go, key)


def _let_go(key: Hashable) -> None:
    count, back = _SHARED.pop(key)
    if count == 1:
        back()
    else:
        _SHARED[key] = count - 1, back
