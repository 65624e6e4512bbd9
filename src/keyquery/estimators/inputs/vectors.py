"""Vectors to search by, and lists of what was found, as users have them: checked, and of length 1."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor


def vectors_of(
    name: str, given: Any, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n dim"]:
    """Vectors (n, dim) of numpy, torch or lists, each divided by its length.

    >>> vectors_of("queries", [[3.0, 4.0]])
    tensor([[0.6000, 0.8000]])
    """
    found = _tensor(name, given)
    if found.ndim != 2 or 0 in found.shape:
        hint = ": one vector alone is [vector]" if found.ndim == 1 and len(found) else ""
        raise ValueError(f"{name} must be vectors (n, dim), at least one, got shape {tuple(found.shape)}{hint}")
    if found.dtype == torch.bool or found.dtype.is_complex:
        raise ValueError(f"{name} must hold real numbers, got {found.dtype}")
    found = found.detach().to(device, torch.float64 if found.dtype == torch.float64 else torch.float32)
    length = torch.linalg.vector_norm(found, dim=1, keepdim=True)
    if not length.isfinite().all():
        row = int((~length.isfinite()).flatten().nonzero()[0, 0])
        what = "NaN or infinity" if not found[row].isfinite().all() else "values too large to be squared"
        raise ValueError(f"{name} must be finite: row {row} holds {what}")
    if not (length > 0).all():
        row = int((length == 0).flatten().nonzero()[0, 0])
        raise ValueError(f"{name} must have a direction: row {row} is a zero vector, or so small that its square is 0")
    return (found / length).to(dtype)


def descriptors_of(features: Any, device: str) -> list[Float[Tensor, "n _"]]:
    """One set of vectors (n, dim), or several descriptors of the same n items, each of its own width.

    >>> [tuple(one.shape) for one in descriptors_of([torch.ones(5, 3), torch.ones(5, 2)], "cpu")]
    [(5, 3), (5, 2)]
    """
    several = [features[i] for i in range(len(features))] if _are_several(features) else None
    if several is None:
        return [vectors_of("features", features, device)]
    found = [vectors_of(f"features[{place}]", one, device) for place, one in enumerate(several)]
    counts = [len(one) for one in found]
    if len(set(counts)) > 1:
        raise ValueError(f"features must be descriptors of the same items, got {', '.join(map(str, counts))} of them")
    return found


def _are_several(features: Any) -> bool:
    """Whether features are sets of vectors, and not vectors."""
    if isinstance(features, (list, tuple)):
        return bool(features) and np.ndim(features[0]) == 2
    return getattr(features, "ndim", 0) == 3 and len(features) > 0


class Asked(NamedTuple):
    """Queries and the database they are asked of, of length 1, on the device."""

    queries: Float[Tensor, "q dim"]
    database: Float[Tensor, "n dim"]


def asked_of(queries: Any, database: Any, device: str, dtype: torch.dtype = torch.float32) -> Asked:
    """Both as vectors, of one width.

    >>> asked_of([[1.0, 0.0]], [[1.0, 0.0, 0.0]], "cpu")
    Traceback (most recent call last):
    ValueError: queries and database must be vectors of one width, got 2 and 3
    """
    found = Asked(vectors_of("queries", queries, device, dtype), vectors_of("database", database, device, dtype))
    widths = found.queries.shape[1], found.database.shape[1]
    if widths[0] != widths[1]:
        raise ValueError(f"queries and database must be vectors of one width, got {widths[0]} and {widths[1]}")
    return found


def lists_of(lists: Any, queries: int, items: int, device: str = "cpu") -> Int64[Tensor, "q m"]:
    """Lists (q, m) of places in the database, best first, one a query, none of them naming an item twice.

    >>> lists_of([[2, 0], [1, 3]], queries=2, items=3)
    Traceback (most recent call last):
    ValueError: lists must hold places in the database, 0 to 2, got 3 in row 1
    """
    found = _tensor("lists", lists)
    if found.ndim != 2 or len(found) != queries or found.shape[1] == 0:
        raise ValueError(f"lists must be ({queries}, m), one list a query, got shape {tuple(found.shape)}")
    if found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool:
        raise ValueError(f"lists must hold places in the database, whole numbers, got {found.dtype}")
    found = found.detach().to(device, torch.int64)
    wrong = (found < 0) | (found >= items)
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"lists must hold places in the database, 0 to {items - 1}, got {found[row, place]} in row {row}"
        )
    ordered = found.sort(1).values
    twice = ordered[:, 1:] == ordered[:, :-1]
    if twice.any():
        row, place = twice.nonzero()[0].tolist()
        raise ValueError(f"lists must name an item once, got {ordered[row, place]} twice in row {row}")
    return found


def like(given: Any, found: Tensor) -> Any:
    """What was found, as torch where torch was given, and else as numpy."""
    return found.to(given.device) if isinstance(given, Tensor) else found.cpu().numpy()


def _tensor(name: str, given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given
    if np.ma.is_masked(given):
        raise ValueError(f"{name} must have all its values, got masked ones")
    try:
        array = np.asarray(given)
    except ValueError:  # rows of different lengths
        raise ValueError(f"{name} must be an array, got rows of different lengths") from None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{name} must hold numbers, got {array.dtype} {type(given).__name__}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch knows few unsigned numbers
    return torch.from_numpy(np.asarray(array.astype(array.dtype.newbyteorder("="), copy=False), order="C"))
