"""Tables for the study of cross-row attention: their files, how they are read, and their splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from keyquery.learn.data.tables import Table, load_table
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional
from keyquery.support.files import csv_text, find_packed, write_all
from keyquery_studies.common.store import array_file, digest_of, npz_bytes, read_json
from keyquery_studies.datapoints.folds import Fold, fold_of

BREAST = "breast_cancer.csv"


@dataclass(frozen=True)
class Source:
    """Where a table comes from: files whose rows are concatenated, and which column is the target."""

    files: tuple[str, ...]
    target: int = -1
    classes: bool = False  # classification
    named: tuple[int, ...] = ()  # numeric columns that are categorical, as published
    apart: tuple[str, ...] = ()  # prefixes of one-hot columns, each decoded to one categorical column
    test: float = 0.1
    held: float = 0.2

    @property
    def folds(self) -> int:
        """Number of folds; large tables have a single split."""
        return int(1 / self.test) if self.test < 0.2 else 1


LARGE: dict[str, Any] = {"test": 0.2, "held": 0.1}
TABLES = {
    "boston": Source(("uci_boston_data.txt",), named=(3, 8)),
    "yacht": Source(("uci_yacht_data.txt",), named=(0, 1, 2, 3, 4)),
    "concrete": Source(("uci_concrete_data.txt",)),
    "breast": Source((BREAST,), classes=True),
    "protein": Source(("uci_protein_data.txt",), **LARGE),
    "adult": Source(("uci_adult_train.csv", "uci_adult_test.csv"), classes=True, **LARGE),
    "poker": Source(("uci_poker_hand_training_true.data",), classes=True, named=tuple(range(10)), **LARGE),
    "forest": Source(("uci_covtype_subset15k.csv",), classes=True, apart=("Wilderness_Area", "Soil_Type"), **LARGE),
    "higgs": Source(
        ("higgs_subset_lightgbm_binary.train", "higgs_subset_lightgbm_binary.test"), target=0, classes=True, **LARGE
    ),
}
SMALL = tuple(name for name, source in TABLES.items() if source.folds > 1)


def split_of(name: str, table: Table, fold: int) -> Fold:
    """The rows of a fold, as published."""
    source = TABLES[name]
    classes = target_of(table) if source.classes else None
    return fold_of(fold, len(table), source.test, source.held, classes)


def target_of(table: Table) -> Shaped[np.ndarray, " rows"]:
    """The target column: numbers, or class codes."""
    assert table.target is not None
    return table.values[table.target]


def prepare_tables(data: str | Path | None, folder: Path, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Facts by name of the tables in a folder of files; the tables themselves are cached in `folder`.

    Files may be compressed (.xz, .gz). Default `data`: the cache of earlier runs, and scikit-learn for breast cancer,
    which is also written as a file.
    """
    index = folder / "tables.json"
    known: dict[str, dict[str, Any]] = read_json(index, {})
    for name in names:
        check_choice("table", name, tuple(TABLES))
    files = {name: _files(name, None if data is None else Path(data)) for name in names or TABLES}
    if not names:
        files = {name: paths for name, paths in files.items() if paths or name in known}
    if not files:
        raise ValueError("no tables found: pass a folder of their files as data (--data)")
    contents = dict[str | Path, str | bytes]()
    for name, paths in files.items():
        if not paths and name not in known:
            raise FileNotFoundError(f"table {name!r} needs {' and '.join(TABLES[name].files)} in the folder of data")
        if paths:
            table = _breast() if paths == ["sklearn"] else _read(name, [Path(file) for file in paths])
            known[name], packed = _pack(name, table)
            contents[folder / array_file(name, known[name]["digest"])] = packed
            if paths == ["sklearn"]:
                contents[folder / BREAST] = csv_text(_records(table))
    folder.mkdir(parents=True, exist_ok=True)
    write_all({**contents, index: json.dumps(known) + "\n"})
    return {name: known[name] for name in files}


def _files(name: str, data: Path | None) -> list[str]:
    """The files of a table, all or none; for breast cancer without a file, scikit-learn."""
    if data is not None and not data.is_dir():
        raise NotADirectoryError(f"data must be a folder of tables, got {data}")
    if data is not None:
        with suppress(FileNotFoundError):
            return [str(find_packed(data, file)) for file in TABLES[name].files]
    return ["sklearn"] if name == "breast" else []


def _breast() -> Table:
    bunch = optional("sklearn.datasets", "the table of breast cancer").load_breast_cancer()
    values = tuple(np.ascontiguousarray(column) for column in bunch.data.T)
    columns = (*map(str, bunch.feature_names), "target")
    kinds, categories = ("numeric",) * len(values), ((),) * len(values)
    class_names = [str(name) for name in bunch.target_names]
    classes = tuple(sorted(class_names))  # as in a file
    codes = np.array([classes.index(class_names[code]) for code in bunch.target], dtype=np.int64)
    return Table(columns, (*kinds, "categorical"), (*values, codes), (*categories, classes), len(values))


def _records(table: Table) -> list[dict[str, Any]]:
    """Rows as in a file; numbers round-trip exactly."""
    columns = [
        [table.categories[number][code] for code in values] if table.categories[number] else values.tolist()
        for number, values in enumerate(table.values)
    ]
    return [dict(zip(table.columns, row, strict=True)) for row in zip(*columns, strict=True)]


def _read(name: str, paths: Sequence[Path]) -> Table:
    source = TABLES[name]
    parts = [load_table(path, target=source.target) for path in paths]
    table = parts[0]
    for other in parts[1:]:
        table = _concatenated(table, other)
    for prefix in source.apart:
        table = _decoded(table, prefix)
    target = table.target
    assert target is not None
    for number in (*source.named, *([target] if source.classes else [])):
        table = _as_categories(table, number)
    if not source.classes and table.kinds[target] != "numeric":
        raise ValueError(f"table {name!r} must have a target of numbers, got {table.categories[target][:3]}")
    return table


def _concatenated(table: Table, other: Table) -> Table:
    """Rows of two files concatenated; categories may end in a dot, as in the test file of Adult."""
    if table.kinds != other.kinds:
        raise ValueError("two files of one table must have the same columns, and theirs differ in type")
    values, categories = [], []
    for number, kind in enumerate(table.kinds):
        if kind == "numeric":
            values.append(np.concatenate((table.values[number], other.values[number])))
            categories.append(())
            continue
        texts = [
            None if code < 0 else part.categories[number][code].removesuffix(".")
            for part in (table, other)
            for code in part.values[number]
        ]
        names = tuple(sorted({text for text in texts if text is not None}))
        codes = {text: code for code, text in enumerate(names)}
        values.append(np.array([-1 if text is None else codes[text] for text in texts], dtype=np.int64))
        categories.append(names)
    return Table(table.columns, table.kinds, tuple(values), tuple(categories), table.target)


def _decoded(table: Table, prefix: str) -> Table:
    """One-hot columns that begin with `prefix`, decoded to one categorical column; a row of zeros is missing."""
    assert table.target is not None
    one_hot = [number for number, column in enumerate(table.columns) if column.startswith(prefix)]
    if not one_hot:
        raise ValueError(f"no column begins with {prefix!r}")
    ones = np.stack([table.values[number] for number in one_hot], 1) == 1
    codes = np.where(ones.any(1), ones.argmax(1), -1).astype(np.int64)
    rest = [number for number in range(len(table.columns)) if number not in one_hot]
    names = tuple(table.columns[number].removeprefix(prefix) for number in one_hot)
    return Table(
        (prefix, *(table.columns[number] for number in rest)),
        ("categorical", *(table.kinds[number] for number in rest)),
        (codes, *(table.values[number] for number in rest)),
        (names, *(table.categories[number] for number in rest)),
        rest.index(table.target) + 1,
    )


def _as_categories(table: Table, number: int) -> Table:
    """A numeric column as categories, in numerical order."""
    if table.kinds[number] == "categorical":
        return table
    levels = np.unique(table.values[number][~np.isnan(table.values[number])])
    codes = np.searchsorted(levels, table.values[number])
    codes[np.isnan(table.values[number])] = -1
    names = tuple(f"{value:g}" for value in levels)

    def changed(old: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
        return (*old[:number], new, *old[number + 1 :])

    kinds, values = changed(table.kinds, "categorical"), changed(table.values, codes.astype(np.int64))
    return Table(table.columns, kinds, values, changed(table.categories, names), table.target)


def _pack(name: str, table: Table) -> tuple[dict[str, Any], bytes]:
    header = json.dumps([table.columns, table.kinds, table.categories, table.target])
    arrays = {f"column{number}": values for number, values in enumerate(table.values)}
    assert table.target is not None
    sizes = {"rows": len(table), "features": len(table.columns) - 1, "classes": len(table.categories[table.target])}
    contents = npz_bytes({"said": np.array(header), **arrays})  # "said": the header's name in users' files
    return {"table": name, "digest": digest_of(header, *table.values), **sizes}, contents


@lru_cache(maxsize=4)
def load_kept(folder: Path, name: str, digest: str) -> Table:
    """A table that `prepare_tables` has cached in a folder."""
    with np.load(folder / array_file(name, digest)) as arrays:
        columns, kinds, categories, target = json.loads(str(arrays["said"]))
        values = tuple(arrays[f"column{number}"] for number in range(len(columns)))
    return Table(tuple(columns), tuple(kinds), values, tuple(map(tuple, categories)), int(target))
