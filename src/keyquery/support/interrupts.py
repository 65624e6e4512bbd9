"""Interrupts that end a computation early instead of losing it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_interrupt_stops() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt as usual.

    Only the main thread receives signals: in others nothing changes.

    >>> with first_interrupt_stops() as stopped:
    ...     stopped()
    False
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
