"""Tables and ensembles as the released TabPFN v1 prepares them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from keyquery.learn.inputs.tables import Columns, Field, encode
from keyquery.support.extras import optional

FARTHEST = 100.0  # standard deviations at which values are clipped
OUTLIER = 4.0  # standard deviations beyond which values are compressed
LEAST = 1e-6  # added to a standard deviation


class Member(NamedTuple):
    """One view of the table: columns rotated by `columns`, classes by `classes`, power-transformed or not."""

    classes: int
    columns: int
    power: bool


def members(count: int, columns: int, classes: int, seed: int) -> list[Member]:
    """The first `count` members: all pairs of rotations in random order, each without and with the power transform.

    >>> [member.power for member in members(3, columns=2, classes=2, seed=0)]
    [False, True, False]
    """
    generator = torch.Generator().manual_seed(seed)
    by_column, by_class = (torch.randperm(size, generator=generator).tolist() for size in (columns, classes))
    pairs = list(product(by_class, by_column))
    random.Random(0).shuffle(pairs)  # the release's own order
    return [Member(by, first, power) for (by, first), power in product(pairs, (False, True))][:count]


def numbers(columns: Columns, fields: Sequence[Field]) -> Float64[np.ndarray, "n d"]:
    """Columns as numbers, categories as their index in sorted order, NaN where missing."""
    rows = encode(columns, fields)
    table = rows.codes.double().numpy()
    for place, (field, values) in enumerate(zip(fields, columns.values, strict=True)):
        if field.categories is None:
            table[:, place] = values.astype(np.float64)
    table[rows.hidden.numpy()] = np.nan
    return table


class Preparation:
    """Scaling of a table by its training rows: standardised, power-transformed, outliers compressed.

    Columns that are constant in training are dropped. Missing values become 0, the mean.
    """

    def __init__(self, table: Float64[np.ndarray, "n d"], power: bool) -> None:
        present = [column[~np.isnan(column)] for column in table.T]
        self.kept = np.array([len(column) > 0 and bool((column != column[0]).any()) for column in present])
        table = table[:, self.kept]
        self.mean = np.nanmean(table, 0) if table.size else np.zeros(0)
        self.scale = _deviation(table, self.mean) + LEAST
        standard = self._standard(table)
        self.powers = [_power_of(standard[:, [column]]) if power else None for column in range(standard.shape[1])]
        values = self._powered(standard).astype(np.float64)
        low, high = _bounds(values)
        self.low, self.high = _bounds(np.where((values < low) | (values > high), np.nan, values))

    def __call__(self, table: Float64[np.ndarray, "n d"], width: int) -> Float32[Tensor, "n kept"]:
        """Rows as the network takes them, scaled by `width` over the number of columns."""
        values = self._powered(self._standard(table[:, self.kept]))
        reach = np.log1p(np.abs(values))
        values = np.minimum(reach + self.high, np.maximum(self.low - reach, values))
        scaled = np.nan_to_num(values, nan=0.0) * (width / max(values.shape[1], 1))
        return torch.from_numpy(scaled.astype(np.float32))

    def _standard(self, table: Float64[np.ndarray, "n kept"]) -> Float32[np.ndarray, "n kept"]:
        return ((table - self.mean) / self.scale).clip(-FARTHEST, FARTHEST).astype(np.float32)

    def _powered(self, standard: Float32[np.ndarray, "n kept"]) -> Float32[np.ndarray, "n kept"]:
        powered = standard.copy()
        for place, power in enumerate(self.powers):
            if power is not None:
                with np.errstate(all="ignore"):
                    powered[:, [place]] = power.transform(standard[:, [place]])
        return powered


def _power_of(column: Float32[np.ndarray, "n 1"]) -> Any:
    """A fitted Yeo-Johnson transform; None where it overflows, and the column is taken unchanged."""
    transform = optional("sklearn.preprocessing", "the power transform").PowerTransformer()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            finite = np.isfinite(transform.fit(column).transform(column)[~np.isnan(column)]).all()
    except (Warning, ValueError, ArithmeticError, RuntimeError):  # of scipy's search for an optimum
        return None
    return transform if finite else None


def _deviation(table: Float64[np.ndarray, "n d"], mean: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, " d"]:
    """Standard deviation of the values that are not missing; 0 of a single one."""
    count = (~np.isnan(table)).sum(0)
    return np.sqrt(np.nansum((table - mean) ** 2, 0) / np.maximum(count - 1, 1))


def _bounds(values: Float64[np.ndarray, "n d"]) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value of each column that is no outlier."""
    mean = np.nanmean(values, 0) if values.size else np.zeros(values.shape[1])
    reach = OUTLIER * _deviation(values, mean)
    return mean - reach, mean + reach
