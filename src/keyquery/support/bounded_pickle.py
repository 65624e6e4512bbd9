"""Safe reading of pickles as plain data: opcodes are interpreted one by one, within limits; no code is executed.

A pickle is a program. Here it may create plain containers, numbers, strings and bytes, and call only the functions that
the caller allows; steps, copied bytes, nesting and shared containers are all limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pickletools import genops
from typing import Any, BinaryIO

from keyquery.support.printable import printable

DEEPEST = 100  # levels of containers
STEPS = 3_000_000  # opcodes, and items that calls copy: limits time and objects; a tensor takes about 40
SHARED, ITEMS = 8, 10_000  # limit on items with all shared containers expanded: SHARED per step, plus ITEMS
COPIED, SOME = 2, 2**20  # limit on bytes that calls copy: COPIED per byte of the file, plus SOME
WIDEST = 2**127  # limit of integers; torch writes one of 80 bits at the start of a file


class Stateful:
    """An object that a call creates and the opcode BUILD completes."""

    def build(self, state: Any) -> None:
        """Set the state that the pickle holds."""
        raise NotImplementedError


class UnknownName(ValueError):  # noqa: N818
    """A pickle names a class or function that is not allowed."""


class Pickle:
    """A reader of one or more pickles in a file, one per call of `load`."""

    def __init__(self, names: Mapping[str, Any], size: int, persistent: Callable[[Any], Any] | None = None) -> None:
        self.names, self.persistent = names, persistent
        self._functions = {id(value) for value in names.values() if callable(value)}
        self.steps, self.bytes_left = 0, COPIED * size + SOME
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self, file: BinaryIO | Any) -> Any:
        """The value of the next pickle; the file position is left after it."""
        self.stack = []
        self.marks = []
        self.memo = {}
        for opcode, argument, _ in genops(file):
            self._spend(1)
            step = OPCODES.get(opcode.name)
            if step is None:
                raise ValueError(f"it holds the opcode {opcode.name}, which is not supported")
            step(self, argument)
        value = self.stack.pop()
        check_sharing(value, SHARED * self.steps + ITEMS)
        return value

    def _number(self, number: int) -> None:
        if not -WIDEST < number < WIDEST:
            raise ValueError("it holds an integer of more than 128 bits")
        self.stack.append(number)

    def _tuple(self, count: int) -> None:
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def _spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > STEPS:
            raise ValueError(f"it takes more than {STEPS} steps to read")

    def _charge(self, arguments: Any) -> None:
        """Count the bytes and items of its arguments that a call may copy."""
        for argument in arguments if isinstance(arguments, tuple) else (arguments,):
            if isinstance(argument, (str, bytes)):
                self.bytes_left -= len(argument)
            elif isinstance(argument, KINDS):
                self._spend(len(argument))
        if self.bytes_left < 0:
            raise ValueError("it copies more bytes than it holds")

    def _marked(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def _pop(self, _: Any) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def _append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError(f"it sets items of a {type(target).__name__}")
        target.update(pairs(zip(items[::2], items[1::2], strict=True)))

    def _dict(self, _: Any) -> None:
        items = self._marked()
        self.stack.append({})
        self._set(items)

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, set):
            raise ValueError(f"it adds to a {type(target).__name__}")
        target.update(map(as_key, items))

    def _name(self, module: str, name: str) -> None:
        whole = f"{module}.{name}"
        if whole not in self.names:
            raise UnknownName(printable(whole[:100]))
        self.stack.append(self.names[whole])

    def _call(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if id(function) not in self._functions or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is not a function")
        self._charge(arguments)
        self.stack.append(function(*arguments))

    def _build(self, _: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Stateful):
            self._charge(state)
            target.build(state)
        elif not isinstance(target, dict):  # attributes of a dict, such as `_metadata` of a state dict, are dropped
            raise ValueError(f"it sets the state of a {type(target).__name__}")

    def _persistent(self, _: Any) -> None:
        if self.persistent is None:
            raise ValueError("it holds persistent ids")
        self.stack.append(self.persistent(self.stack.pop()))


VALUES = ["FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"]
VALUES += ["BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"]
OPCODES: dict[str, Callable[[Pickle, Any], Any]] = {
    **dict.fromkeys(VALUES, lambda self, value: self.stack.append(value)),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), Pickle._number),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda self, _: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda self, place: self.memo.__setitem__(place, self.stack[-1])),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda self, place: self.stack.append(self.memo[place])),
    "NONE": lambda self, _: self.stack.append(None),
    "NEWTRUE": lambda self, _: self.stack.append(True),
    "NEWFALSE": lambda self, _: self.stack.append(False),
    "EMPTY_TUPLE": lambda self, _: self.stack.append(()),
    "EMPTY_LIST": lambda self, _: self.stack.append([]),
    "EMPTY_DICT": lambda self, _: self.stack.append({}),
    "EMPTY_SET": lambda self, _: self.stack.append(set()),
    "TUPLE1": lambda self, _: self._tuple(1),
    "TUPLE2": lambda self, _: self._tuple(2),
    "TUPLE3": lambda self, _: self._tuple(3),
    "MARK": Pickle._mark,
    "POP": Pickle._pop,
    "POP_MARK": lambda self, _: self._marked(),
    "DUP": lambda self, _: self.stack.append(self.stack[-1]),
    "MEMOIZE": lambda self, _: self.memo.__setitem__(len(self.memo), self.stack[-1]),
    "TUPLE": lambda self, _: self.stack.append(tuple(self._marked())),
    "LIST": lambda self, _: self.stack.append(self._marked()),
    "DICT": Pickle._dict,
    "FROZENSET": lambda self, _: self.stack.append(frozenset(map(as_key, self._marked()))),
    "BYTEARRAY8": lambda self, data: self.stack.append(bytes(data)),
    "APPEND": lambda self, _: self._append([self.stack.pop()]),
    "APPENDS": lambda self, _: self._append(self._marked()),
    "SETITEM": lambda self, _: self._set([self.stack.pop(-2), self.stack.pop()]),
    "SETITEMS": lambda self, _: self._set(self._marked()),
    "ADDITEMS": lambda self, _: self._add(self._marked()),
    "GLOBAL": lambda self, name: self._name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda self, _: self._name(self.stack.pop(-2), self.stack.pop()),
    "REDUCE": Pickle._call,
    "BUILD": Pickle._build,
    "BINPERSID": Pickle._persistent,
}


def as_key(value: Any) -> Any:
    """Check a dict key: only types that hash fast and cannot be chosen to collide are allowed."""
    small = isinstance(value, int) and -(2**63) <= value < 2**64
    if not (small or isinstance(value, (str, bytes, float, type(None)))):
        raise ValueError(f"a {type(value).__name__} is not supported as a key")
    return value


def pairs(items: Iterable[Any]) -> dict[Any, Any]:
    """A dict of key-value pairs, with checked keys."""
    return {as_key(key): value for key, value in items}


def latin1(text: str, encoding: str = "latin1") -> bytes:
    """Bytes, as pickles of protocol 2 write them: `_codecs.encode(text, "latin1")`."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("it holds bytes that are not encoded as latin1")
    return text.encode("latin1")


def check_sharing(root: Any, most: int) -> None:
    """Refuse containers that are too deep, contain themselves, or have more than `most` items when expanded."""
    measured: dict[int, tuple[int, int]] = {}  # levels and items of each container, including nested ones
    path: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting[-1]
        if id(node) in measured:
            waiting.pop()
            continue
        inner = _containers(node)
        if id(node) not in path:
            path.add(id(node))
            if len(path) > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} deep")
            if any(id(child) in path for child in inner):
                raise ValueError("it contains itself")
            waiting += (child for child in inner if id(child) not in measured)
            continue
        path.remove(id(waiting.pop()))
        depth = 1 + max((measured[id(child)][0] for child in inner), default=0)
        items = (len(node) if isinstance(node, KINDS) else 0) + sum(measured[id(child)][1] for child in inner)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if items > most:
            raise ValueError(f"its shared containers expand to more than {most} items")
        measured[id(node)] = depth, items


KINDS = (list, tuple, dict, set, frozenset)


def _containers(node: Any) -> list[Any]:
    if not isinstance(node, KINDS):
        return []
    return [item for item in (node.values() if isinstance(node, dict) else node) if isinstance(item, KINDS)]
