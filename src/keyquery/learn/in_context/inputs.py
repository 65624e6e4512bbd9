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
ADDED = 1e-6  # to a standard deviation


class Member(NamedTuple):
    """One view of the table: columns rotated by `columns`, classes by `classes`, power-transformed or not."""

    classes: int
    columns: int
    power: bool


def members(count: int, columns: int, classes: int, seed: int) -> list[Member]:
    """The first `count` members: all pairs of rotations in random order, each without and with the power transform."""
    generator = torch.Generator().manual_seed(seed)
    by_column, by_class = (torch.randperm(size, generator=generator).tolist() for size in (columns, classes))
    pairs = list(product(by_class, by_column))
    random.Random(0).shuffle(pairs)  # the release's own order
    return [Member(by, first, power) for (by, first), power in product(pairs, (False, True))][:count]


def numbers(columns: Columns, fields: Sequence[Field]) -> Float64[np.ndarray, "n d"]:
    """Columns as numbers, categories as their index in sorted order, NaN where missing."""
    rows = encode(columns, fields)
    table = rows.codes.double().numpy()
    for column, (field, values) in enumerate(zip(fields, columns.values, strict=True)):
        if field.categories is None:
            table[:, column] = values.astype(np.float64)
    table[rows.hidden.numpy()] = np.nan
    return table


class Preparation:
    """Scaling of a table by its training rows; columns that are constant there are dropped, missing values the mean."""

    def __init__(self, table: Float64[np.ndarray, "n d"], power: bool) -> None:
        present = [column[~np.isnan(column)] for column in table.T]
        self.kept = np.array([len(column) > 0 and bool((column != column[0]).any()) for column in present])
        table = table[:, self.kept]
        self.mean, deviation = _moments(table)
        self.scale = deviation + ADDED
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
        for column, power in enumerate(self.powers):
            if power is not None:
                with np.errstate(all="ignore"):
                    powered[:, [column]] = power.transform(standard[:, [column]])
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


def _moments(values: Float64[np.ndarray, "n d"]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the values that are not missing; the deviation of a single one is 0."""
    count = (~np.isnan(values)).sum(0)
    mean = np.nansum(values, 0) / np.maximum(count, 1)
    return mean, np.sqrt(np.nansum((values - mean) ** 2, 0) / np.maximum(count - 1, 1))


def _bounds(values: Float64[np.ndarray, "n d"]) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value of each column that is no outlier."""
    mean, deviation = _moments(values)
    return mean - OUTLIER * deviation, mean + OUTLIER * deviation
