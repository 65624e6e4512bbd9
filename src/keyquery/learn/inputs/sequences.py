"""Time series to padded, standardised tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.learn.data.series import Series
from keyquery.learn.inputs.targets import dense, is_missing

WANTED = "X must be (n, length, dims) or (n, length), or a list of series"


class Padded(NamedTuple):
    """Standardised series of one batch; a token is real where any of its dimensions has a value."""

    values: Float[Tensor, "batch n dims"]  # 0 if missing
    real: Bool[Tensor, "batch n"]

    def take(self, index: Tensor) -> Padded:
        """A batch of some series, padded to the longest of them."""
        real = self.real[index]
        length = int(real.any(0).nonzero().max()) + 1
        return Padded(self.values[index, :length], real[:, :length])

    def batches(self, size: int) -> Iterator[Padded]:
        """All series in batches."""
        for first in range(0, len(self.values), size):
            yield self.take(torch.arange(first, min(first + size, len(self.values)), device=self.values.device))

    def alike(self, size: int) -> list[Int[Tensor, " some"]]:
        """Batches of series whose lengths differ by at most a factor of two."""
        places = torch.arange(1, self.real.shape[1] + 1, device=self.real.device)
        lengths, order = (self.real * places).amax(1).sort(stable=True)
        each, sizes, first = lengths.tolist(), list[int](), 0
        for end in range(1, len(each) + 1):
            if end == len(each) or end - first == size or each[end] > 2 * each[first]:
                sizes.append(end - first)
                first = end
        return list(order.split(sizes))


def series_of(X: Any, axis: int = 1) -> list[Float64[np.ndarray, "_ dims"]]:
    """A list of arrays (length, dims) from such a list, an array (n, length, dims) or (n, length), or a Series.

    With `axis=2` time is the last axis, (n, dims, length). A data frame may hold one series per cell, dims as columns.
    """
    if isinstance(X, Series):
        X, axis = X.values, 1
    X = dense(X)
    if isinstance(X, Tensor):  # nested
        X = list(X.unbind())
    if not isinstance(X, (list, tuple)):
        original, X = X, X if isinstance(X, np.ma.MaskedArray) else np.asarray(X)
        if X.ndim == 1 and X.dtype == object:
            return series_of(list(X), axis)
        if X.ndim == 2 and X.dtype == object and all(np.ndim(cell) == 1 for cell in X.flat):
            return series_of([_columns(number, cells) for number, cells in enumerate(X)])
        if X.ndim not in (2, 3):
            several = "that is one axis too many" if X.ndim else "that is not an array"
            hint = "Reshape your data: pass a single series as X[None]" if X.ndim == 1 else several
            shape = X.shape if X.ndim else type(original).__name__
            raise ValueError(f"{WANTED}, got {shape}. {hint}")
        if 0 in X.shape[1:]:
            raise ValueError(
                f"X has no values: 0 feature(s) (shape={X.shape}) while a minimum of 1 is required: no steps"
            )
    if len(X) == 0:
        raise ValueError("X holds no series: found 0 sample(s), at least one is required")
    series = [_series(number, values, axis) for number, values in enumerate(X)]
    dims = series[0].shape[1]
    for number, values in enumerate(series):
        if values.shape[1] != dims:
            swapped = axis == 1 and len({len(each) for each in series}) == 1
            hint = "; if series are (dims, length), as in aeon, set axis=2" if swapped else ""
            raise ValueError(
                f"all series of X must have the dims of the first, {dims}; series {number} has {values.shape[1]}{hint}"
            )
    return series


def columns_of(X: Any) -> list[str] | None:
    """The column names if X is a list of data frames, else None."""
    if not isinstance(X, (list, tuple)) or not all(hasattr(frame, "columns") for frame in X) or not X:
        return None
    names = [list(map(str, frame.columns)) for frame in X]
    for number, own in enumerate(names):
        if own != names[0]:
            raise ValueError(
                f"all series of X must have the columns of the first, {names[0]}; series {number} has {own}"
            )
    return names[0]


def axes_of(x: Any) -> int:
    """How deep lists and arrays are nested."""
    depth = 0
    while isinstance(x, (list, tuple)) and x:
        depth, x = depth + 1, x[0]
    return depth + getattr(x, "ndim", 0)


def _numbers(data: Any) -> np.ndarray:
    """An array of float64: NaN where a value is masked, None or pandas' NA."""
    values = data if isinstance(data, np.ma.MaskedArray) else np.asarray(dense(data))
    if values.dtype.kind == "c":
        raise ValueError("Complex data not supported")
    if values.dtype.kind in "mM":
        raise ValueError(f"dates and times are not supported, got {values.dtype}")
    if values.dtype == object:
        flat = [np.nan if is_missing(value) else value for value in values.ravel().tolist()]
        values = np.array(flat, dtype=object).reshape(values.shape)
    return np.ma.filled(values.astype(np.float64), np.nan)


def _columns(number: int, cells: Any) -> np.ndarray:
    """One series from a row of a nested frame: a cell per dimension."""
    columns = [_series(number, cell) for cell in cells]
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"the dims of series {number} of X must have one length, got {[len(c) for c in columns]}")
    return np.concatenate(columns, 1)


def _series(number: int, data: Any, axis: int = 1) -> np.ndarray:
    try:
        values = _numbers(data)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"series {number} of X must be an array of numbers (length, dims): {error}") from None
    if values.ndim == 0:
        raise ValueError(f"{WANTED}, and series {number} of X is one number: a single series must be passed as [X]")
    if values.ndim == 1:
        values = values[:, None]
    elif axis == 2:
        values = values.T
    if values.ndim != 2:
        raise ValueError(f"series {number} of X must be (length, dims) or (length,), got shape {values.shape}")
    if values.size == 0:
        raise ValueError(f"series {number} of X has no values: its shape is {values.shape}")
    if np.isinf(values).any():
        raise ValueError(f"series {number} of X holds infinity: values must be finite, or NaN where they are missing")
    if np.isnan(values).all():
        raise ValueError(f"series {number} of X has no values: all are NaN")
    return values


def statistics(series: Sequence[Float64[np.ndarray, "_ dims"]], name: str = "X") -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (dims,), ignoring NaN; a constant dimension has standard deviation 1."""
    values = np.concatenate(series)
    present = ~np.isnan(values)
    counts = np.maximum(present.sum(0), 1)
    mean = np.where(present, values, 0.0).sum(0) / counts
    with np.errstate(over="ignore"):  # infinities are reported below
        spread = np.sqrt(np.square(np.where(present, values - mean, 0.0)).sum(0) / counts)
    if not (np.isfinite(mean).all() and np.isfinite(spread).all()):
        raise ValueError(f"{name} holds values too large to be standardised: their squares are infinite")
    constant = spread <= 1e-9 * np.abs(mean)  # up to rounding
    return mean, np.where(constant | (spread == 0), 1.0, spread)


def restored_statistics(tensors: dict[str, Tensor], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of a saved estimator, removed from its tensors and validated; `axis` names them in errors."""
    mean, scale = tensors.pop("mean"), tensors.pop("scale")
    if not all(tensor.isfinite().all() for tensor in (mean, scale)):
        raise ValueError("mean or scale holds NaN or infinity")
    if mean.ndim != 1 or mean.shape != scale.shape or not (scale > 0).all():
        raise ValueError(f"mean and scale must be ({axis},), and scale above 0")
    return mean.double().numpy(), scale.double().numpy()


def padded(series: Sequence[np.ndarray], mean: np.ndarray, scale: np.ndarray, device: str = "cpu") -> Padded:
    """Series standardised and zero-padded to the longest; missing values are 0, the mean.

    Values beyond float32 become infinite; the outputs of the network are then not finite either.
    """
    lengths = [len(rows) for rows in series]
    values = np.zeros((len(series), max(lengths), len(mean)), dtype=np.float32)
    real = np.zeros(values.shape[:2], dtype=bool)
    for number, rows in enumerate(series):
        with np.errstate(over="ignore"):
            values[number, : len(rows)] = np.nan_to_num((rows - mean) / scale, nan=0.0)
        real[number, : len(rows)] = ~np.isnan(rows).all(1)
    return Padded(torch.from_numpy(values).to(device), torch.from_numpy(real).to(device))
