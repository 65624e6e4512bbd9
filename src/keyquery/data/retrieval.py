"""ROxford and RParis, the revisited benchmarks of image retrieval, from their files."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from keyquery.extras import optional
from keyquery.forms.checks import check_choice

SETUPS = {"easy": ("easy",), "medium": ("easy", "hard"), "hard": ("hard",)}  # what is to be found
GROUPS = ("easy", "hard", "junk")
# What arrays of numpy are made of in a pickle, under the names of old and new versions.
ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
}


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
    and `junk`. It is read as data: arrays of numpy and plain containers, anything else is refused and nothing is run.
    `features` is an .npz or .mat file with Q and X, or a folder with Q.npy and X.npy; vectors are rows or, as in the
    published .mat files, columns. A .mat file needs scipy (the extra `estimators`).

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


class _Plain(pickle.Unpickler):
    """Reads arrays and plain containers, and refuses the rest by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OLD:
            return OLD[module, name]
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        place = module.replace("numpy.core", "numpy._core") if hasattr(np, "_core") else module
        return getattr(import_module(place), name)


def _latin(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it holds bytes in {encoding!r}")
    return text.encode("latin1")


def _nothing() -> bytes:
    return b""


OLD = {("_codecs", "encode"): _latin, ("__builtin__", "bytes"): _nothing}  # how old pickles write bytes


def _unpickled(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return _Plain(BytesIO(path.read_bytes()), encoding="latin1").load()
    except Exception as error:  # a pickle that is damaged may fail in any way
        raise ValueError(f"{path} is no pickle of arrays and plain containers: {error}") from None


def _truth(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[np.ndarray, ...]]]:
    """Names of images and of queries, and places easy, hard and junk."""
    told = _unpickled(path)
    if not isinstance(told, Mapping) or not {"imlist", "qimlist", "gnd"} <= set(told):
        raise ValueError(f"{path} must hold imlist, qimlist and gnd")
    names, query_names = (tuple(map(str, told[key])) for key in ("imlist", "qimlist"))
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
    places = np.asarray(given).ravel()
    if places.size and (places.dtype.kind not in "iu" or places.min() < 0 or places.max() >= count):
        raise ValueError(f"{path}: {where} must hold places 0 to {count - 1} of images, got {given!r:.60}")
    return places.astype(np.int64)


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    if path.is_dir():
        return {
            name: np.load(path / f"{name}.npy", allow_pickle=False) for name in "QX" if (path / f"{name}.npy").is_file()
        }
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    if path.suffix == ".mat":
        return _matlab(path)
    if path.suffix != ".npz":
        raise ValueError(f"features must be an .npz or .mat file, or a folder with Q.npy and X.npy, got {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in "QX" if name in file}
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no .npz file of arrays: {error}") from None


def _matlab(path: Path) -> Mapping[str, np.ndarray]:
    reader = optional("scipy.io", "a .mat file")
    try:
        found = reader.loadmat(path, variable_names=["Q", "X"])
        return {name: found[name] for name in "QX" if name in found}
    except Exception as error:  # scipy has many words for a damaged file
        raise ValueError(f"{path} is no .mat file that scipy reads: {error}") from None


def _rows(path: str | Path, name: str, array: Any, count: int) -> Float[np.ndarray, "n dim"]:
    """Vectors as rows; where they are columns, which the number of images tells, turned."""
    if array.ndim != 2 or array.dtype.kind != "f" or count not in array.shape:
        raise ValueError(
            f"{path}: {name} must have {count} vectors as rows or columns, got {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array if array.shape[0] == count else array.T)
