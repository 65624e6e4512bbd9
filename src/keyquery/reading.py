"""Reading: the one result type, which every analysis returns."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from keyquery._version import __version__
from keyquery.kinds import kinds
from keyquery.support.bounded_json import parse_json
from keyquery.support.extras import optional
from keyquery.support.field_checks import check_fields
from keyquery.support.files import read_text, write_all, write_text
from keyquery.support.printable import REPR, brief, printable

CLASSES: dict[str, type[Reading]] = {}  # kinds whose module has been imported
FORMER_KINDS = {"foretelling": "event evaluation", "leaning": "npt explanation", "turned": "dial effect"}  # schema 1
FORMER_SUFFIXES = (".parquet", ".safetensors")
PRESET = 3  # of xz: higher ones take much longer for a few per cent


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of an analysis: its numbers, their units and their provenance.

    Each analysis adds its fields in a frozen subclass, such as `class Look(Reading, kind="look")`. A reading is plain
    data: tensors and arrays are converted to lists on construction, so that a loaded reading equals the saved one.
    `kind` names the class in JSON, `schema` its version.

    >>> class Width(kq.Reading, kind="width"):
    ...     units = {"metres": "m"}
    >>> Width(provenance={"model": "a plank"}).to_json()
    '{"schema": 2, "kind": "width", "units": {"metres": "m"}, "provenance": {"model": "a plank"}}'
    """

    kind: ClassVar[str] = "reading"
    schema: ClassVar[int] = 2
    units: ClassVar[Mapping[str, str]] = {}
    former: ClassVar[Mapping[str, str]] = {}  # names in files of former versions → present names

    provenance: Mapping[str, Any] = field(
        default_factory=dict
    )  # where the numbers come from: digests of tensors, settings, versions

    def __init_subclass__(cls, kind: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        known = CLASSES.get(kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"the kind {kind!r} belongs to {known.__module__}.{known.__qualname__}")
        cls.kind = kind
        CLASSES[kind] = cls
        shown = cls.__dict__.get("__repr__", Reading.__repr__)  # the dataclass's own would print every number
        cls.__repr__ = lambda self: printable(shown(self), REPR)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, plain(getattr(self, f.name)))

    def __repr__(self) -> str:
        shown: list[str] = []
        most = REPR - len(f"{type(self).__name__}(, … {len(names := fields(self))} more)")
        for number, f in enumerate(names):
            shown.append(f"{f.name}={brief(getattr(self, f.name))}")
            if len(", ".join(shown)) > most:
                shown[-1] = f"… {len(names) - number} more"
                break
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """The reading as a dict, as stored in JSON.

        >>> kq.Reading().to_dict()["kind"]
        'reading'
        """
        head = {"schema": self.schema, "kind": self.kind, "units": dict(self.units)}
        return {**head, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def to_json(self, path: str | Path | None = None) -> str:
        """The reading as JSON text, also written to `path` if given; NaN and infinities raise ValueError.

        >>> kq.Reading(provenance={"seed": 0}).to_json()
        '{"schema": 2, "kind": "reading", "units": {}, "provenance": {"seed": 0}}'
        """
        data = self.to_dict()
        try:
            text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            where, what = next(_not_json(data))
            raise ValueError(f"{where} is {what!r}, which JSON cannot represent") from None
        if path is not None:
            write_text(path, text + "\n")
        return text

    def save(self, path: str | Path) -> None:
        """Write the reading to a file: JSON, compressed if the name ends in .json.xz, to about a third.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     kq.Reading(provenance={"seed": 0}).save(f"{folder}/a.json.xz")
        ...     kq.Reading.load(f"{folder}/a.json.xz")
        Reading(provenance={'seed': 0})
        """
        write_all({path: self.content(path)})

    def content(self, path: str | Path) -> bytes:
        """What `save` writes to a file of this name.

        >>> kq.Reading().content("a.json")[:13]
        b'{"schema": 2,'
        """
        suffix = Path(path).suffix.lower()
        if suffix in FORMER_SUFFIXES:
            raise ValueError(f"a reading is written as .json or .json.xz, not {suffix}")
        text = self.to_json().encode() + b"\n"
        return lzma.compress(text, preset=PRESET) if suffix == ".xz" else text

    @staticmethod
    def load(source: str | Path) -> Reading:
        """Load a reading from a file that `save` or `to_json` wrote, or from JSON text; its `kind` selects the class.

        >>> kq.Reading.load(kq.Reading(provenance={"seed": 0}).to_json())
        Reading(provenance={'seed': 0})
        """
        is_text = isinstance(source, str) and source.lstrip()[:1] in ("{", "[")
        text = str(source) if is_text else read_text(source)
        try:
            data = parse_json(text, finite=True)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a reading: invalid JSON at line {error.lineno}, column {error.colno}") from None
        except ValueError as error:
            raise ValueError(f"not a reading: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or "schema" not in data:
            raise ValueError("not a reading: expected a JSON object with `kind` and `schema`")
        kind = data.pop("kind")
        cls = _class_of(str(FORMER_KINDS.get(kind, kind)))
        if (schema := data.pop("schema")) not in range(1, cls.schema + 1) or isinstance(schema, bool):
            raise ValueError(
                f"this reading of kind {cls.kind!r} has schema {schema!r:.40}; this version reads 1 to {cls.schema}"
            )
        data.pop("units", None)
        try:
            data = renamed(data, cls.former) if schema < cls.schema and cls.former else data
            check_fields(cls, data)
        except ValueError as error:
            raise ValueError(f"not a reading of kind {cls.kind!r}: {error}") from None
        try:
            return cls(**data)
        except (TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
            raise ValueError(f"not a reading of kind {cls.kind!r}: {error}") from None

    def records(self) -> list[dict[str, Any]]:
        """Flat rows for `to_frame` and CSV; by default one row of all scalar fields.

        >>> kq.Reading().records()
        [{'kind': 'reading'}]
        """
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        return [{"kind": self.kind, **{k: v for k, v in row.items() if not isinstance(v, (list, dict))}}]

    def to_frame(self) -> Any:
        """`records()` as a pandas DataFrame (extra `frames`).

        >>> kq.Reading().to_frame().shape
        (1, 1)
        """
        return optional("pandas", "to_frame").DataFrame(self.records())

    def _repr_html_(self) -> str:
        return str(_pages().html(self))

    def plot(self, what: str | None = None, **options: Any) -> Any:
        """A matplotlib figure of the reading (extra `plot`), for kinds that have one.

        Looks and comparisons have two: "triangle", the default on data, and "map", the symmetry of every head.
        """
        return _pages().plot(self, what, **options)

    def page(self, path: str | Path | None = None) -> str:
        """The reading as a self-contained HTML page, also written to `path` if given; for kinds that have one."""
        text = str(_pages().page(self))
        if path is not None:
            write_text(path, text)
        return text


def provenance(**facts: Any) -> dict[str, Any]:
    """Provenance of a result: the given facts, and the versions that computed it."""
    versions = {"keyquery": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {**facts, "versions": versions}


def digest(tensor: Tensor | np.ndarray) -> str:
    """The first half of the SHA-256 of a tensor's bytes in row-major order, independent of the file format."""
    array = tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().contiguous()
    data = array if isinstance(array, np.ndarray) else array.flatten().view(torch.uint8).numpy()
    return hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()[:32]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor of a state dict."""
    return {name: digest(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def plain(value: Any) -> Any:
    """A value as plain JSON data: tensors and arrays as lists, mappings as dicts, paths as strings."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        numbers = set(map(type, value)) <= {float}  # long spectra are common and already plain
        return list(value) if numbers else [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Plain data with dict keys, and string values of the key "part", renamed by `names`."""
    if isinstance(value, dict):
        return {
            names.get(key, key): names.get(item, item)
            if key == "part" and isinstance(item, str)
            else renamed(item, names)
            for key, item in value.items()
        }
    return [renamed(item, names) for item in value] if isinstance(value, list) else value


def short(value: Any, digits: int) -> Any:
    """Plain data with floats rounded to a number of significant digits, which keeps pages small."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: short(item, digits) for key, item in value.items()}
    return [short(item, digits) for item in value] if isinstance(value, list) else value


def _not_json(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The places and values in plain data that JSON cannot represent."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_json(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, f"{where}[{index}]")
    elif not isinstance(value, (str, int, type(None))) and not (isinstance(value, float) and math.isfinite(value)):
        yield where, value


def _class_of(kind: str) -> type[Reading]:
    if kind == Reading.kind:
        return Reading
    if kind not in CLASSES:
        known = kinds()
        if kind not in known:
            every = ", ".join(sorted({*known, *CLASSES}))
            raise ValueError(f"unknown kind of reading {kind!r:.60}; known kinds: {every}")
        import_module(known[kind].module)
    return CLASSES[kind]


def _pages() -> ModuleType:
    """The package of displays, imported on use: the only import against the order of the package layout."""
    return import_module("keyquery.pages")
