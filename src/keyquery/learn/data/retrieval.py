"""The image-retrieval benchmarks ROxford and RParis (revisited Oxford and Paris), from their files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from keyquery.support.arrays import ARRAYS, read_arrays
from keyquery.support.bounded_pickle import Pickle, Stateful, UnknownName, latin1
from keyquery.support.checks import check_choice
from keyquery.support.files import decompressed_limit, read_bytes, regular
from keyquery.support.printable import brief

SETUPS = {"easy": ("easy",), "medium": ("easy", "hard"), "hard": ("hard",)}  # groups that count as relevant
GROUPS = ("easy", "hard", "junk")
NUMBERS = re.compile(r"[iu][1248]|f[248]|b1")  # supported dtypes


@dataclass(frozen=True, eq=False, repr=False)
class Revisited:
    """A revisited retrieval benchmark, as `load_revisited` reads it and `kq.score_rankings` needs it."""

    queries: Float[np.ndarray, "q dim"]  # descriptors
    database: Float[np.ndarray, "n dim"]  # descriptors
    easy: tuple[Int64[np.ndarray, " _"], ...]  # indices of images in the database, per query
    hard: tuple[Int64[np.ndarray, " _"], ...]  # as `easy`
    junk: tuple[Int64[np.ndarray, " _"], ...]  # as `easy`
    query_names: tuple[str, ...] = ()  # of the query images
    names: tuple[str, ...] = ()  # of the database images

    def __repr__(self) -> str:
        return f"Revisited({len(self.queries)} queries, {len(self.database)} images, dim {self.queries.shape[1]})"

    def setup(self, name: str) -> tuple[list[Int64[np.ndarray, " _"]], list[Int64[np.ndarray, " _"]]]:
        """Relevant and junk images of each query in the setup "easy", "medium" or "hard"."""
        check_choice("setup", name, tuple(SETUPS))
        relevant = SETUPS[name]
        both = []
        for groups in (relevant, [group for group in GROUPS if group not in relevant]):
            parts = [getattr(self, group) for group in groups]
            both.append([np.unique(np.concatenate(query)) for query in zip(*parts, strict=True)])
        return both[0], both[1]


def load_revisited(truth: str | Path, features: str | Path) -> Revisited:
    """Load ROxford or RParis: ground truth and descriptors.

    `truth` is a gnd_*.pkl file: a dict with `imlist`, `qimlist` and `gnd`, the latter with `easy`, `hard` and `junk`
    per query. It is parsed as data, arrays of numbers and plain containers; no code in the pickle is executed.
    `features` is an .npz or .mat file with descriptors Q of the queries and X of the database, as rows or, as in the
    published .mat files, as columns.
    """
    names, query_names, groups = _truth(Path(truth))
    if regular(features).suffix not in (".mat", ".npz"):
        raise ValueError(f"features must be an .npz or .mat file, got {features}")
    arrays = _matlab(Path(features)) if Path(features).suffix == ".mat" else read_arrays(features, "Q", "X")
    for key in ("Q", "X"):
        if key not in arrays:
            raise ValueError(f"{features} must hold Q (queries) and X (database); {key} is missing")
    queries = _rows(features, "Q", arrays["Q"], len(query_names))
    database = _rows(features, "X", arrays["X"], len(names))
    if queries.shape[1] != database.shape[1]:
        raise ValueError(f"{features}: Q and X must have the same dim, got {queries.shape[1]} and {database.shape[1]}")
    easy, hard, junk = (groups[name] for name in GROUPS)
    return Revisited(queries, database, easy, hard, junk, query_names, names)


class _DType(Stateful):
    """A numeric dtype by its code; its state is the byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not NUMBERS.fullmatch(code):
            received = repr(code[:40]) if isinstance(code, str) else f"a {type(code).__name__}"
            raise ValueError(f"it holds an array of {received}; supported: integers, floats and booleans")
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        """(version, byte order, …); the rest is irrelevant for numbers."""
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("it holds an array with an unknown byte order")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(Stateful):
    """An array over the bytes that the pickle holds."""

    values: np.ndarray | None = None

    def build(self, state: Any) -> None:
        """([version], shape, dtype, whether in Fortran order, bytes)."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise ValueError("it holds an array that is not made of bytes, a dtype and a shape")
        shape, kind, fortran, data = state[-4:]
        self.values = _over(data.encode("latin1") if isinstance(data, str) else data, kind, shape, "CF"[bool(fortran)])


def _over(data: Any, kind: Any, shape: Any, order: str = "C") -> np.ndarray:
    shape = shape if isinstance(shape, tuple) else (shape,)
    if not isinstance(data, bytes) or not isinstance(kind, _DType) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("it holds an array that is not made of bytes, a dtype and a shape")
    if math.prod(shape) * kind.dtype.itemsize != len(data):
        raise ValueError(f"it holds an array {shape!r:.60} of {kind.dtype} in {len(data)} bytes")
    return np.frombuffer(data, kind.dtype).reshape(shape, order="F" if order == "F" else "C")


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any = "C") -> _Array:
    array = _Array()
    array.values = _over(data, kind, shape, order)
    return array


def _scalar(kind: Any, data: Any) -> Any:
    return _over(data, kind, ()).item()


# The callables of pickled numpy arrays, under the names of old and new numpy versions.
NAMES: dict[str, Any] = {
    "numpy.ndarray": None,
    "numpy.dtype": _DType,
    "_codecs.encode": latin1,
    **{f"{module}.bytes": lambda: b"" for module in ("__builtin__", "builtins")},
    **{
        f"numpy.{core}.{name}": function
        for core in ("core", "_core")
        for name, function in (
            ("multiarray._reconstruct", lambda *_: _Array()),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _from_buffer),
        )
    },
}


def _unpickled(path: Path) -> Any:
    data = read_bytes(path)
    try:
        return Pickle(NAMES, len(data)).load(BytesIO(data))
    except UnknownName as error:
        reason = f"it names {error!s:.100}, which is not an array type"
    except Exception as error:  # a damaged pickle may fail in any way
        reason = f"{str(error) or type(error).__name__:.300}"
    raise ValueError(f"{path} is not a pickle of arrays and plain containers: {reason}")


def _truth(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[np.ndarray, ...]]]:
    """Names of images and queries, and the easy, hard and junk indices."""
    truth = _unpickled(path)
    if not isinstance(truth, Mapping) or not {"imlist", "qimlist", "gnd"} <= set(truth):
        raise ValueError(f"{path} must hold imlist, qimlist and gnd")
    for key in ("imlist", "qimlist"):
        if not isinstance(truth[key], (list, tuple)) or not all(isinstance(name, str) for name in truth[key]):
            raise ValueError(f"{path}: {key} must be a list of texts, got {brief(truth[key])}")
    names, query_names, queries = tuple(truth["imlist"]), tuple(truth["qimlist"]), truth["gnd"]
    if not isinstance(queries, (list, tuple)) or len(queries) != len(query_names):
        raise ValueError(f"{path}: gnd must be a list with an entry for each of {len(query_names)} queries")
    groups: dict[str, list[np.ndarray]] = {group: [] for group in GROUPS}
    for number, query in enumerate(queries):
        for group in GROUPS:
            if not isinstance(query, Mapping) or group not in query:
                raise ValueError(f"{path}: gnd[{number}] must have {', '.join(GROUPS)}")
            groups[group].append(_checked(path, f"gnd[{number}]['{group}']", query[group], len(names)))
    return names, query_names, {group: tuple(indices) for group, indices in groups.items()}


def _checked(path: Path, where: str, value: Any, count: int) -> Int64[np.ndarray, " _"]:
    index = value.values if isinstance(value, _Array) else value
    if isinstance(index, (list, tuple)) and all(type(number) is int and abs(number) < 2**63 for number in index):
        index = np.array(index, dtype=np.int64)
    if isinstance(index, np.ndarray) and not index.size:
        return np.zeros(0, dtype=np.int64)
    if not isinstance(index, np.ndarray) or index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= count:
        raise ValueError(f"{path}: {where} must hold image indices from 0 to {count - 1}, got {brief(index)}")
    return index.ravel().astype(np.int64)


def _matlab(path: Path) -> Mapping[str, np.ndarray]:
    from scipy import io as reader

    try:
        most = decompressed_limit(path.stat().st_size, ARRAYS)
        descriptors = [variable for variable in reader.whosmat(path) if variable[0] in "QX"]
        if not {kind for _, _, kind in descriptors} <= {"double", "single"}:
            raise ValueError("Q and X must be double or single")
        if sum(8 * math.prod(shape) for _, shape, _ in descriptors) > most:
            raise ValueError(f"Q and X have more than {most} bytes")
        arrays = reader.loadmat(path, variable_names=["Q", "X"])
        return {name: arrays[name] for name in "QX" if name in arrays}
    except Exception as error:  # scipy raises errors of many types for damaged files
        raise ValueError(f"{path} is not a .mat file that scipy can read: {error}") from None


def _rows(path: str | Path, name: str, array: Any, count: int) -> Float[np.ndarray, "n dim"]:
    """Vectors as rows; transposed if they are columns, according to the number of images."""
    if array.ndim != 2 or array.dtype.kind != "f" or count not in array.shape:
        received = f"{array.dtype} {array.shape}"
        raise ValueError(f"{path}: {name} must have {count} vectors as rows or columns, got {received}")
    return np.ascontiguousarray(array if array.shape[0] == count else array.T)
