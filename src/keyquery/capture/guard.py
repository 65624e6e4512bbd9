"""Changes to a live model that nothing comes between: neither an interrupt nor another thread.

Python delivers signals to its main thread, between two bytecodes: one that fell between a change and the note of how
to undo it would leave the model changed. So they are held during the few lines that change or restore a model.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from keyquery.capture.transformers_attention import configs_of

Change = Callable[[ExitStack], Any]  # does something, and puts its way back on the stack

PAUSE = 0.002  # seconds between two attempts to get a model that another thread uses
_CHANGES = threading.RLock()  # one change at a time, of any model: models may share modules, configs and switches
_USED: dict[int, tuple[int, int]] = {}  # id of a part of a model in use: by which thread, and how many times over
_CLAIMED: dict[int, tuple[int, int]] = {}  # likewise, of models with a change that lasts
_SHARED: dict[Hashable, tuple[int, Callable[[], Any]]] = {}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, signals that Python code handles wait, and so do changes in other threads; for a few lines only.

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
    before = {number: found for number in signal.valid_signals() if callable(found := signal.getsignal(number))}

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
    finally:  # once more, for a signal that came between those two lines, or before all handlers were in place
        _handle(before)
        _deliver(waiting)


def _handle(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _deliver(numbers: list[int]) -> None:
    """Raise the signals that waited; an exception that one becomes does not swallow the others."""
    try:
        if numbers:
            signal.raise_signal(numbers.pop(0))
    finally:
        if numbers:
            _deliver(numbers)


@contextmanager
def temporarily(model: nn.Module, *changes: Change, foreign: bool = False) -> Iterator[None]:
    """Within, the model is this thread's alone and as `changes` make it; afterwards, whatever happened, as before.

    Another thread that wants it waits. A model that another thread has dialled or projected is refused, but for
    `foreign` use, which is undoing that.

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
    finally:  # once more, for an interrupt that came before signals were held: what is closed stays closed
        _close(stack)


def alone(model: nn.Module) -> Any:
    """Within, the model is this thread's alone: other threads' uses of it wait.

    >>> with alone(torch.nn.Linear(1, 1)):
    ...     pass
    """
    return temporarily(model)


def put_back(model: nn.Module) -> Any:
    """Whatever implementations a model's configs name within, afterwards they name what they did before.

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
                raise RuntimeError("another thread has dialled or projected this model: undo that first")
            if all(_USED.get(id(part), (me,))[0] == me for part in parts):
                _count(_USED, parts, stack)
                return
        time.sleep(PAUSE)


def claim(model: nn.Module, changes: ExitStack) -> None:
    """Say that a change of this thread lasts: until it is undone, other threads' uses of the model are refused."""
    _count(_CLAIMED, [*model.modules(), *configs_of(model)], changes)


def _count(counts: dict[int, tuple[int, int]], parts: list[Any], stack: ExitStack) -> None:
    """One more for every part; the stack holds the parts, so that their ids stay theirs."""
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
    """Something that several changes share: the first begins it, the last one to be undone takes it back.

    `begin` does it, and gives what undoes it.
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
