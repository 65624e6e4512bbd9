"""Data for the study `transport`: Gaussian classes with known Bayes accuracy, and public tables."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from keyquery.learn.base import hold_out
from keyquery.learn.data import load_table
from keyquery.learn.data.tables import Table
from keyquery.support.extras import optional
from keyquery.support.files import find_packed, write_all
from keyquery_studies.common.store import array_file, digest_of, npz_bytes

SCIKIT = {"breast cancer": "load_breast_cancer", "wine": "load_wine", "iris": "load_iris", "digits": "load_digits"}
SIDE = 3 / (1 + math.sqrt(2))
# Means of classes with covariance 2I, as published: times i, pairs are 2i apart, of three classes in the mean.
MEANS = {2: ((0.0, -1.0), (0.0, 1.0)), 3: ((-SIDE, 0.0), (SIDE, 0.0), (0.0, SIDE))}
LEARN = {1: 400, 20: 45}  # sequences of so many steps; 45 of 20 steps as published
TEST = {1: 10_000, 20: 2000}
HELD_OUT = 0.3  # of a public table, to test on
ROWS = 4000  # training rows of Adult, resampled for every seed


class Split(NamedTuple):
    """Sequences (n, steps, features), one step each of a table, and classes; to learn from, and to test on."""

    x: Float[np.ndarray, "n steps features"]
    y: Int[np.ndarray, " n"]
    test_x: Float[np.ndarray, "m steps features"]
    test_y: Int[np.ndarray, " m"]


def simulated(classes: int, i: int, steps: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of Gaussian points around the mean of their class, with covariance 2I."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    return i * np.array(MEANS[classes])[y][:, None] + math.sqrt(2) * rng.normal(size=(count, steps, 2)), y


@cache
def bayes(classes: int, i: int, steps: int = 1) -> float:
    """The accuracy of the best rule there is: of two classes Φ(i√(steps/2)), of three the integral of the largest
    density of the mean over steps, on a grid.
    """
    if classes == 2:
        return 0.5 * (1 + math.erf(i * math.sqrt(steps) / 2))
    variance, grid = 2 / steps, np.linspace(-2 * i - 9, 2 * i + 9, 1001)
    at = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1)
    nearest = np.min([np.square(at - i * np.array(mean)).sum(-1) for mean in MEANS[classes]], 0)
    density = np.exp(-nearest / (2 * variance)) / (2 * math.pi * variance)
    return float(density.sum() * (grid[1] - grid[0]) ** 2 / classes)


def named(classes: int, i: int, steps: int) -> str:
    """What a simulated set is called."""
    return f"{classes} classes, i = {i}" + (f", {steps} steps" if steps > 1 else "")


SIMULATED = {named(*which): which for which in [(k, i, 1) for k in MEANS for i in (1, 2, 3, 4)]}
SIMULATED |= {named(*which): which for which in [(2, 1, 20), (3, 1, 20)]}
SETS = (*SIMULATED, *SCIKIT, "adult")


def split_of(dataset: str, seed: int, folder: Path, digest: str | None = None) -> Split:
    """Training and test data of a seed; Adult is in `folder` under its digest."""
    if dataset in SIMULATED:
        classes, i, steps = SIMULATED[dataset]
        fresh = simulated(classes, i, steps, TEST[steps], 10_000 + seed)
        return Split(*simulated(classes, i, steps, LEARN[steps], seed), *fresh)
    if dataset == "adult":
        arrays = _adult(folder / f"adult-{digest}.npz")
        rows = np.random.default_rng(seed).permutation(len(arrays.y))[:ROWS]
        return arrays._replace(x=arrays.x[rows], y=arrays.y[rows])
    x, y = getattr(optional("sklearn.datasets", "the data set"), SCIKIT[dataset])(return_X_y=True)
    learned, test = hold_out(y, HELD_OUT, seed)
    return Split(x[learned][:, None], y[learned], x[test][:, None], y[test])


def keep_adult(source: str | Path, folder: Path) -> dict[str, Any]:
    """Read uci_adult_train.csv and uci_adult_test.csv, compressed or not, in a folder, and put them into a study's."""
    paths = [find_packed(source, f"uci_adult_{part}.csv") for part in ("train", "test")]
    tables = [load_table(path, target=-1, header=False) for path in paths]
    x, test_x = one_hot(*tables)
    y, test_y = (_rich(table) for table in tables)
    split = Split(x[:, None], y, test_x[:, None], test_y)
    digest = digest_of(*split)
    folder.mkdir(parents=True, exist_ok=True)
    write_all({folder / array_file("adult", digest): npz_bytes(split._asdict())})
    return {"digest": digest, "train": len(y), "test": len(test_y), "features": x.shape[1]}


def one_hot(learned: Table, test: Table) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "m d"]]:
    """Numbers as they are, the mean where one is missing, and a column of 0 and 1 for every category of the first."""
    columns: list[list[np.ndarray]] = [[], []]
    for place, kind in enumerate(learned.kinds):
        if place == learned.target:
            continue
        both = [table.values[place] for table in (learned, test)]
        if kind == "numeric":
            mean = float(np.nanmean(both[0]))
            encoded = [np.nan_to_num(values, nan=mean)[:, None] for values in both]
        else:
            known = learned.categories[place]
            texts = [np.array([*table.categories[place], ""])[table.values[place]] for table in (learned, test)]
            encoded = [(column[:, None] == np.array(known)).astype(np.float64) for column in texts]
        for part, own in zip(columns, encoded, strict=True):
            part.append(own)
    x, test_x = (np.concatenate(part, 1).astype(np.float32) for part in columns)
    return x, test_x


def _rich(table: Table) -> Int[np.ndarray, " n"]:
    """1 where the income is above 50K; labels of the test file end with a dot."""
    assert table.target is not None
    names = np.array([name.startswith(">50K") for name in table.categories[table.target]])
    return names[table.values[table.target]].astype(np.int64)


@lru_cache(maxsize=1)
def _adult(path: Path) -> Split:
    with np.load(path, allow_pickle=False) as arrays:
        return Split(*(arrays[name] for name in Split._fields))
