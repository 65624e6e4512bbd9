"""Changes to a live model, with exclusive use of it: undone at the end of a block, or else found by `kq.undo`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock, current_thread
from typing import Any

from torch import nn

Change = Callable[[ExitStack], Any]  # makes a change, and pushes its undo on the stack

BUSY = "the model is in use by another thread: run one after the other"

_LOCK = RLock()  # for the two tables below; never held while a model runs
_OPEN: list[Changes] = []  # oldest first
_SHARED: dict[Hashable, tuple[Callable[[], Any], set[object]]] = {}  # undo and holders of a shared change


class Changes(ExitStack):
    """A stack of undos, which `kq.undo` finds until it is closed.

    With `exclusive`, it is refused if another thread uses the model, and other threads are refused until it is closed.
    With `insist`, which is for undoing, it is not refused, but the other thread is told at the end of its use.
    """

    def __init__(self, model: nn.Module, exclusive: bool = False, insist: bool = False) -> None:
        super().__init__()
        self.thread = current_thread() if exclusive else None
        self.model: nn.Module | None = model
        self.parts: set[Any] = {*model.modules(), *map(id, configs_of(model))}  # configs have no hash
        self.disturbed = False
        with _LOCK:
            others = [other for other in _sharing(self.parts) if exclusive and other.is_foreign]
            if others and not insist:
                raise RuntimeError(BUSY)
            for other in others:
                other.disturbed = True
            self.callback(self.forget)  # pushed first, so run last: an interrupted undo can be repeated
            _OPEN.append(self)

    @property
    def is_open(self) -> bool:
        """Whether there is something left to undo."""
        return self in _OPEN

    @property
    def is_foreign(self) -> bool:
        """Whether another thread has exclusive use of the model; one that has ended has none."""
        return self.thread not in (None, current_thread()) and self.thread.is_alive()

    def forget(self) -> None:
        """Let `kq.undo` find these changes no longer; harmless if it does not."""
        with _LOCK:
            _OPEN[:] = [changes for changes in _OPEN if changes is not self]
        self.model, self.parts = None, set()


def _sharing(parts: set[Any]) -> list[Changes]:
    with _LOCK:
        return [changes for changes in _OPEN if not changes.parts.isdisjoint(parts)]


def in_use(model: nn.Module) -> bool:
    """Whether another thread has exclusive use of a model."""
    return any(changes.is_foreign for changes in _sharing({model}))


def left_open(model: nn.Module) -> list[Changes]:
    """Changes to a model, or to one that shares modules with it, oldest first; not those that another thread ends."""
    return [changes for changes in _sharing(set(model.modules())) if not changes.is_foreign]


def close(*opened: Changes) -> None:
    """Undo changes, the last first, whoever uses their models; one that fails does not keep the others."""
    with ExitStack() as stack:
        for changes in opened:
            if changes.model is not None:
                stack.enter_context(Changes(changes.model, exclusive=True, insist=True))
        for changes in opened:
            stack.callback(changes.forget)  # after the next line, where an interrupt has cut an earlier undo short
            stack.callback(changes.close)


@contextmanager
def temporarily(model: nn.Module, *changes: Change) -> Iterator[None]:
    """Context with exclusive use of the model and temporary `changes`, which are always undone at the end."""
    with Changes(model, exclusive=True) as stack:
        try:
            for change in changes:
                change(stack)
            yield
        finally:
            if stack.disturbed:  # a result, or an error, may be of another model
                raise RuntimeError(BUSY)


def alone(source: Any) -> AbstractContextManager[None]:
    """Context with exclusive use of a live model; an empty one for anything else."""
    return temporarily(source) if isinstance(source, nn.Module) else nullcontext()


def hold(key: Hashable, begin: Callable[[], Callable[[], Any]], changes: ExitStack) -> None:
    """A change shared by several others: `begin` makes it for the first, and returns its undo, run with the last."""
    holder = object()
    changes.callback(_let_go, key, holder)
    with _LOCK:
        if key not in _SHARED:
            _SHARED[key] = begin(), set()
        _SHARED[key][1].add(holder)


def _let_go(key: Hashable, holder: object) -> None:
    with _LOCK:
        back, holders = _SHARED.get(key, (None, set()))
        holders.discard(holder)
        if back is not None and not holders:
            back()
            del _SHARED[key]


def configs_of(model: nn.Module) -> list[Any]:
    """Every config in a model that names an attention implementation, each once; submodels have their own."""
    queue = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    configs: dict[int, Any] = {}
    while queue:
        config = queue.pop(0)
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            queue += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return list(configs.values())
