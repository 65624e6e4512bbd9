"""Validation of retrieval inputs: vectors, normalised to length 1, and ranked lists."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from keyquery.support.extras import optional


def vectors_of(
    name: str, values: Any, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n dim"]:
    """Vectors (n, dim) of numpy, torch or lists, each divided by its length."""
    vectors = _tensor(name, values)
    if vectors.ndim != 2 or 0 in vectors.shape:
        hint = ": pass a single vector as [vector]" if vectors.ndim == 1 and len(vectors) else ""
        if vectors.ndim == 2:  # in the words of scikit-learn
            count = f"{len(vectors)} sample(s)" if len(vectors) == 0 else "0 feature(s)"
            hint = f": {count} (shape={tuple(vectors.shape)}) while a minimum of 1 is required."
        raise ValueError(f"{name} must be vectors (n, dim), at least one, got shape {tuple(vectors.shape)}{hint}")
    if vectors.dtype == torch.bool or vectors.dtype.is_complex:
        raise ValueError(f"{name} must hold real numbers, got {vectors.dtype}")
    vectors = vectors.detach().to(device, torch.float64 if vectors.dtype == torch.float64 else torch.float32)
    length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    if not length.isfinite().all():
        row = int((~length.isfinite()).flatten().nonzero()[0, 0])
        problem = "NaN or infinity" if not vectors[row].isfinite().all() else "values too large to be squared"
        raise ValueError(f"{name} must be finite: row {row} holds {problem}")
    if not (length > 0).all():
        row = int((length == 0).flatten().nonzero()[0, 0])
        raise ValueError(f"{name} must have a direction: row {row} is a zero vector, or so small that its square is 0")
    return (vectors / length).to(dtype)


class Asked(NamedTuple):
    """Queries and the database to search, as unit vectors on the device."""

    queries: Float[Tensor, "q dim"]
    database: Float[Tensor, "n dim"]


def asked_of(queries: Any, database: Any, device: str, dtype: torch.dtype = torch.float32) -> Asked:
    """Validated queries and database, vectors of one width."""
    inputs = Asked(vectors_of("queries", queries, device, dtype), vectors_of("database", database, device, dtype))
    widths = inputs.queries.shape[1], inputs.database.shape[1]
    if widths[0] != widths[1]:
        raise ValueError(f"queries and database must be vectors of one width, got {widths[0]} and {widths[1]}")
    return inputs


def lists_of(lists: Any, queries: int, items: int, device: str = "cpu") -> Int64[Tensor, "q m"]:
    """Validated ranked lists (q, m) of database indices, best first, one per query, without duplicates."""
    indices = _tensor("lists", lists)
    if indices.ndim != 2 or len(indices) != queries or indices.shape[1] == 0:
        raise ValueError(f"lists must be ({queries}, m), one list per query, got shape {tuple(indices.shape)}")
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise ValueError(f"lists must hold database indices (integers), got {indices.dtype}")
    indices = indices.detach().to(device, torch.int64)
    wrong = (indices < 0) | (indices >= items)
    if wrong.any():
        row, rank = wrong.nonzero()[0].tolist()
        raise ValueError(f"lists must hold database indices, 0 to {items - 1}, got {indices[row, rank]} in row {row}")
    ordered = indices.sort(1).values
    twice = ordered[:, 1:] == ordered[:, :-1]
    if twice.any():
        row, rank = twice.nonzero()[0].tolist()
        raise ValueError(f"lists must hold each item at most once, got {ordered[row, rank]} twice in row {row}")
    return indices


def like(reference: Any, result: Tensor) -> Any:
    """The result as a torch tensor if `reference` is one, else as a numpy array."""
    return result.to(reference.device) if isinstance(reference, Tensor) else result.cpu().numpy()


def _tensor(name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if np.ma.is_masked(values):
        raise ValueError(f"{name} must not have masked values")
    if np.ndim(values) == 0:
        raise ValueError(f"{name} must be an array, got a single value")
    check_array = optional("sklearn.utils.validation", "re-ranking").check_array
    array = check_array(values, ensure_2d=False, allow_nd=True, ensure_all_finite=False, input_name=name, order="C")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch has few unsigned dtypes
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
