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
        """Batches of series whose lengths are between the same two powers of two."""
        steps = torch.arange(1, self.real.shape[1] + 1, device=self.real.device)
        powers = (self.real * steps).amax(1).double().log2().ceil()
        return [part for power in powers.unique() for part in (powers == power).nonzero().flatten().split(size)]


def series_of(X: Any, axis: int = 1) -> list[Float64[np.ndarray, "_ dims"]]:
    """A list of arrays (length, dims) from such a list, an array (n, length, dims) or (n, length), or a Series.

    With `axis=2` time is the last axis, (n, dims, length).
    """
    if isinstance(X, Series):
        X, axis = X.values, 1
    X = dense(X)
    if not isinstance(X, (list, tuple)):
        array = np.asarray(X)
        ragged = array.ndim == 1 and array.dtype == object
        if not ragged and array.ndim not in (2, 3):
            received = f"shape {array.shape}. Reshape your data: pass a single series as X[None]"
            received = received if array.ndim else type(X).__name__
            raise ValueError(f"X must be (n, length, dims) or (n, length), or a list of series, got {received}")
        if 0 in array.shape[1:]:  # in the words of scikit-learn
            raise ValueError(f"X has no values: 0 feature(s) (shape={array.shape}) while a minimum of 1 is required.")
        X = array
    if len(X) == 0:
        raise ValueError("X holds no series: found 0 sample(s), at least one is required")
    series = [_series(f"series {number} of X", values, axis) for number, values in enumerate(X)]
    dims = series[0].shape[1]
    for number, values in enumerate(series):
        if values.shape[1] != dims:
            swapped = axis == 1 and len({len(other) for other in series}) == 1
            hint = "; if series are (dims, length), as in aeon, set axis=2" if swapped else ""
            received = f"series {number} has {values.shape[1]}{hint}"
            raise ValueError(f"all series of X must have the dims of the first, {dims}; {received}")
    return series


def columns_of(X: Any) -> list[str] | None:
    """The column names if X is a list of data frames, else None."""
    if not isinstance(X, (list, tuple)) or not all(hasattr(frame, "columns") for frame in X) or not X:
        return None
    first, *others = (list(map(str, frame.columns)) for frame in X)
    for number, names in enumerate(others, 1):
        if names != first:
            raise ValueError(f"all series must have the columns of the first, {first}; series {number} has {names}")
    return first


def axes_of(x: Any) -> int:
    """How deep lists and arrays are nested."""
    depth = 0
    while isinstance(x, (list, tuple)) and x:
        depth, x = depth + 1, x[0]
    return depth + getattr(x, "ndim", 0)


def _numbers(data: Any) -> np.ndarray:
    """An array of float64: NaN where a value is masked, None or pandas' NA."""
    values = np.asarray(dense(data))
    if values.dtype.kind in "cmM":
        raise ValueError(f"Complex data not supported, nor dates and times: X must be numbers, got {values.dtype}")
    if values.dtype == object:
        flat = [np.nan if is_missing(value) else value for value in values.ravel().tolist()]
        values = np.array(flat, dtype=object).reshape(values.shape)
    return values.astype(np.float64)


def _series(name: str, data: Any, axis: int) -> np.ndarray:
    """A series (length, dims)."""
    values = _numbers(data)
    if values.ndim not in (1, 2):
        hint = ": a single series must be passed as [X]" if values.ndim == 0 else ""
        raise ValueError(f"{name} must be (length, dims) or (length,), got shape {values.shape}{hint}")
    values = values[:, None] if values.ndim == 1 else values.T if axis == 2 else values
    if np.isinf(values).any():
        raise ValueError(f"{name} holds infinity: values must be finite, or NaN where they are missing")
    if np.isnan(values).all():
        raise ValueError(f"{name} has no values: all are NaN, or there are none, in shape {values.shape}")
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
