"""ROxford and RParis, the revisited benchmarks of image retrieval, from their files."""

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

from keyquery.support.arrays import ARRAYS, read_array, read_arrays
from keyquery.support.bounded_pickle import Pickle, Stateful, UnknownName, latin1
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.files import read_bytes, regular, room_for

SETUPS = {"easy": ("easy",), "medium": ("easy", "hard"), "hard": ("hard",)}  # what is to be found
GROUPS = ("easy", "hard", "junk")
NUMBERS = re.compile(r"[iu][1248]|f[248]|b1")  # dtypes of arrays that are read


@dataclass(frozen=True, eq=False, repr=False)
class Revisited:
    """Vectors of queries (q, dim) and of the database (n, dim), and for each query its easy, hard and junk places."""

    queries: Float[np.ndarray, "q dim"]
    database: Float[np.ndarray, "n dim"]
    easy: tuple[Int64[np.ndarray, " _"], ...]
    hard: tuple[Int64[np.ndarray, " _"], ...]
    junk: tuple[Int64[np.ndarray, " _"], ...]
    query_names: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Revisited({len(self.queries)} queries, {len(self.database)} images, dim {self.queries.shape[1]})"

    def setup(self, name: str) -> tuple[list[Int64[np.ndarray, " _"]], list[Int64[np.ndarray, " _"]]]:
        """What is relevant and what is junk, query by query, under "easy", "medium" or "hard"."""
        check_choice("setup", name, tuple(SETUPS))
        wanted = SETUPS[name]
        both = []
        for chosen in (wanted, [group for group in GROUPS if group not in wanted]):
            parts = [getattr(self, group) for group in chosen]
            both.append([np.unique(np.concatenate(one)) for one in zip(*parts, strict=True)])
        return both[0], both[1]


def load_revisited(truth: str | Path, features: str | Path) -> Revisited:
    """ROxford or RParis: a gnd_*.pkl file, and vectors of queries Q and of the database X.

    The file of truth is a pickle: a dict with `imlist`, `qimlist` and `gnd`, for each query a dict with `easy`, `hard`
    and `junk`. It is read as data: arrays of numbers and plain containers, anything else is refused and nothing is run.
    `features` is an .npz or .mat file with Q and X, or a folder with Q.npy and X.npy; vectors are rows or, as in the
    published .mat files, columns. A .mat file needs scipy (the extra `estimators`).

    >>> import pickle
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     told = {"imlist": ["a", "b"], "qimlist": ["q"], "gnd": [{"easy": [0], "hard": [], "junk": [1]}]}
    ...     size = Path(folder, "gnd_tiny.pkl").write_bytes(pickle.dumps(told))
    ...     np.savez(Path(folder, "tiny.npz"), Q=np.ones((1, 3)), X=np.ones((2, 3)))
    ...     load_revisited(Path(folder, "gnd_tiny.pkl"), Path(folder, "tiny.npz"))
    Revisited(1 queries, 2 images, dim 3)
    """
    names, query_names, groups = _truth(Path(truth))
    arrays = _arrays(Path(features))
    for key in ("Q", "X"):
        if key not in arrays:
            raise ValueError(f"{features} must hold Q, of queries, and X, of the database; it lacks {key}")
    queries = _rows(features, "Q", arrays["Q"], len(query_names))
    database = _rows(features, "X", arrays["X"], len(names))
    if queries.shape[1] != database.shape[1]:
        raise ValueError(f"{features}: Q and X must be of one width, got {queries.shape[1]} and {database.shape[1]}")
    easy, hard, junk = (groups[name] for name in GROUPS)
    return Revisited(queries, database, easy, hard, junk, query_names, names)


class _DType(Stateful):
    """A dtype of numbers, by its code; its state is the byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not NUMBERS.fullmatch(code):
            what = repr(code[:40]) if isinstance(code, str) else f"a {type(code).__name__}"
            raise ValueError(f"it holds an array of {what}; integers, floats and truth values are read")
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        """(version, byte order, …), of which nothing else is of use for numbers."""
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("it holds an array of an unknown byte order")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(Stateful):
    """An array over the bytes that the pickle holds."""

    values: np.ndarray | None = None

    def build(self, state: Any) -> None:
        """([version], shape, dtype, whether in Fortran's order, bytes)."""
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


# What arrays of numpy are made of in a pickle, under the names of old and new versions.
NAMES: dict[str, Any] = {
    "numpy.ndarray": None,
    "numpy.dtype": _DType,
    "_codecs.encode": latin1,
    **{f"{place}.bytes": lambda: b"" for place in ("__builtin__", "builtins")},
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
        reason = f"it names {error!s:.100}, which is no array"
    except Exception as error:  # a pickle that is damaged may fail in any way
        reason = f"{str(error) or type(error).__name__:.300}"
    raise ValueError(f"{path} is no pickle of arrays and plain containers: {reason}")


def _truth(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[np.ndarray, ...]]]:
    """Names of images and of queries, and places easy, hard and junk."""
    told = _unpickled(path)
    if not isinstance(told, Mapping) or not {"imlist", "qimlist", "gnd"} <= set(told):
        raise ValueError(f"{path} must hold imlist, qimlist and gnd")
    for key in ("imlist", "qimlist"):
        if not isinstance(told[key], (list, tuple)) or not all(isinstance(name, str) for name in told[key]):
            raise ValueError(f"{path}: {key} must be a list of texts, got {_brief(told[key])}")
    names, query_names = tuple(told["imlist"]), tuple(told["qimlist"])
    if not isinstance(told["gnd"], (list, tuple)):
        raise ValueError(f"{path}: gnd must be a list, got {_brief(told['gnd'])}")
    if len(told["gnd"]) != len(query_names):
        raise ValueError(
            f"{path}: gnd must have an entry for each of {len(query_names)} queries, got {len(told['gnd'])}"
        )
    groups: dict[str, list[np.ndarray]] = {group: [] for group in GROUPS}
    for number, one in enumerate(told["gnd"]):
        for group in GROUPS:
            if not isinstance(one, Mapping) or group not in one:
                raise ValueError(f"{path}: gnd[{number}] must have {', '.join(GROUPS)}")
            groups[group].append(_checked(path, f"gnd[{number}]['{group}']", one[group], len(names)))
    return names, query_names, {group: tuple(each) for group, each in groups.items()}


def _checked(path: Path, where: str, given: Any, count: int) -> Int64[np.ndarray, " _"]:
    places = given.values if isinstance(given, _Array) else given
    if isinstance(places, (list, tuple)) and all(type(place) is int and abs(place) < 2**63 for place in places):
        places = np.array(places, dtype=np.int64)
    if isinstance(places, np.ndarray) and not places.size:
        return np.zeros(0, dtype=np.int64)
    if not isinstance(places, np.ndarray) or places.dtype.kind not in "iu" or places.min() < 0 or places.max() >= count:
        raise ValueError(f"{path}: {where} must hold places 0 to {count - 1} of images, got {_brief(given)}")
    return places.ravel().astype(np.int64)


def _brief(given: Any) -> str:
    given = given.values if isinstance(given, _Array) else given
    return f"{given[:5]!r:.60}" if isinstance(given, (list, tuple, np.ndarray)) and len(given) else f"{given!r:.60}"


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    if path.is_dir():
        return {name: read_array(path / f"{name}.npy") for name in "QX" if (path / f"{name}.npy").is_file()}
    if regular(path).suffix == ".mat":
        return _matlab(path)
    if path.suffix != ".npz":
        raise ValueError(f"features must be an .npz or .mat file, or a folder with Q.npy and X.npy, got {path}")
    return read_arrays(path, "Q", "X")


def _matlab(path: Path) -> Mapping[str, np.ndarray]:
    reader = optional("scipy.io", "a .mat file")
    try:
        _check_matlab(reader.whosmat(path), room_for(path.stat().st_size, ARRAYS))
        found = reader.loadmat(path, variable_names=["Q", "X"])
        return {name: found[name] for name in "QX" if name in found}
    except Exception as error:  # scipy has many words for a damaged file
        raise ValueError(f"{path} is no .mat file that scipy reads: {error}") from None


def _check_matlab(variables: list[tuple[str, tuple[int, ...], str]], most: int) -> None:
    """Require matrices of floats, which together are no larger than a packed file may come to."""
    wanted = [variable for variable in variables if variable[0] in "QX"]
    for name, _, kind in wanted:
        if kind not in ("double", "single"):
            raise ValueError(f"{name} is of {kind}; expected double or single")
    if sum(8 * math.prod(shape) for _, shape, _ in wanted) > most:
        raise ValueError(f"Q and X come to more than {most} bytes")


def _rows(path: str | Path, name: str, array: Any, count: int) -> Float[np.ndarray, "n dim"]:
    """Vectors as rows; where they are columns, which the number of images tells, turned."""
    if array.ndim != 2 or array.dtype.kind != "f" or count not in array.shape:
        raise ValueError(
            f"{path}: {name} must have {count} vectors as rows or columns, got {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array if array.shape[0] == count else array.T)
