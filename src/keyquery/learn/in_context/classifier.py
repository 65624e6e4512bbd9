"""InContextClassifier: tabular classification by a pretrained network, without training."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor
from torch.nn.functional import pad

from keyquery.learn.base import Classifier, check_sizes, seed_of
from keyquery.learn.in_context.explanation import InContextExplanation, Question, attribute
from keyquery.learn.in_context.network import ContextNetwork, read_network, sizes_of
from keyquery.learn.inputs.tables import Columns, Field, columns_of, encode, fields_of
from keyquery.learn.inputs.targets import classes_of, label_facts
from keyquery.learn.layers.datapoints import Memory
from keyquery.learn.npt.base import SupportSet
from keyquery.support.devices import pick_device
from keyquery.support.extras import optional
from keyquery.support.progress import bars

ROWS = 1000  # the largest training sets of the published network
TOKENS = 16_384  # rows of all members that are computed at a time
CACHED = 2**28  # numbers of keys and values up to which they are kept: 1 GiB
FARTHEST = 100.0  # standard deviations at which values are clipped
OUTLIER = 4.0  # standard deviations beyond which values are compressed
ADDED = 1e-6  # to a standard deviation


@dataclass(eq=False, repr=False)
class InContextClassifier(Classifier, SupportSet):
    """Tabular classifier without training: a pretrained network attends from each row to the labelled rows (TabPFN v1).

    Recommended: accuracy .790 on 13 small tables, .006 above a forest (not resolved), at 27 times its CPU time.

    `fit` only keeps the training rows; `predict` passes them with the new rows through the network, whose published
    weights are given as a file. X is a data frame, a `kq.data.Table`, an array or a list of rows. Categories are passed
    as numbers, their index in sorted order; a missing value is replaced by the mean of its column. Several views of the
    table are averaged: columns and classes rotated, each without and with a power transform. New rows never attend to
    each other, so that the prediction for a row does not depend on the batch.

    The network was trained on small tables, and `fit` refuses others: at most 1,000 rows, 100 columns and 10 classes.

    Parameters
    ----------
    weights
        Path of the published weights as safetensors, with the tensor names of the release.
    ensemble
        Number of views; fewer if the table does not have as many. Default: 32.
    random_state
        Seed of the rotations: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Raises
    ------
    ValueError
        By `fit`, beyond 1,000 rows, 100 columns or 10 classes.

    See Also
    --------
    NPTClassifier : trained on one table, of any size.

    Examples
    --------
    >>> model = kq.InContextClassifier("tabpfn_v1_fp16.safetensors", ensemble=8)
    >>> model.fit(X, y).predict_proba(X_test)  # doctest: +SKIP
    """

    weights: str | Path
    ensemble: int = 32
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def fit(self, X: Any, y: Any = None) -> InContextClassifier:
        """Keep a table X and classes y (n,). Default y: the target column, if X is a `kq.data.Table`.

        Parameters
        ----------
        X
            A table: a `kq.data.Table`, a data frame or an array (n, columns).
        y
            Classes (n,). Default: the target column, if X is a `kq.data.Table`.

        Returns
        -------
        InContextClassifier
            The fitted estimator.
        """
        self._check()
        pick_device(self.device)
        columns = columns_of(X)
        _, classes, codes, _ = self._labelled(X, y, len(columns.values[0]))
        network = read_network(self.weights)
        for what, size, most in (
            ("rows", len(codes), ROWS),
            ("columns", len(columns.values), network.columns),
            ("classes", len(classes), network.classes),
        ):
            if size > most:
                raise ValueError(f"X and y have {size:,} {what}, and this network supports at most {most:,}")
        self.fields_ = fields_of(columns)
        self.network_, self.table_ = network, numbers(columns, self.fields_)
        self.classes_, self.codes_ = classes, codes.astype(np.int64)
        self.members_ = members(self.ensemble, len(columns.values), len(classes), seed_of(self.random_state))
        self._keep_columns(columns.names, len(columns.values))
        self.params_, self.history_ = self._plain_params(), []
        return self

    def explain(self, row: Any, rows: int = 5) -> InContextExplanation:
        """Which training rows and columns, and which parts of the scores, the prediction of one row depends on.

        Effects are drops of the log-odds of the predicted class. A column's entry is replaced by its mean; a training
        row is removed from the context; a part (symmetric, skew, popularity) is removed from the attention scores of
        the row in every layer. Every training row has the mean of each part of its scores over layers, heads and
        members.

        Parameters
        ----------
        row
            One row of a table, such as X[:1].
        rows
            How many training rows, those with the most attention, are removed; each takes as long as `predict` for the
            first time. Default: 5.

        Returns
        -------
        InContextExplanation
            A Reading; `.plot()` draws it.
        """
        asked = numbers(self._one_row(row, rows), self.fields_)
        masked = np.where(np.eye(asked.shape[1], dtype=bool), np.nan, asked)  # one column at a time
        with bars(self.verbose) as progress:
            question = self._question(np.concatenate((asked, masked)))
            logits, parts, effects = attribute(question, rows, self._group(), progress)
        labels, chosen = label_facts(self.classes_)["labels"], int(logits.argmax())
        table = [*self._entries(self.table_), [labels[code] for code in self.codes_]]
        return InContextExplanation(
            predicted=labels[chosen],
            probability=float(logits.softmax(-1)[chosen]),
            parts=parts,
            **self._explained(
                effects, [column[0] for column in self._entries(asked)], table, np.arange(len(self.codes_))
            ),
        )

    def _entries(self, table: Float64[np.ndarray, "n d"]) -> list[list[Any]]:
        """Columns in the user's units and categories; None if missing."""
        return [
            [
                None if np.isnan(value) else value if field.categories is None else field.categories[int(value)]
                for value in column
            ]
            for field, column in zip(self.fields_, table.T.tolist(), strict=True)
        ]

    def _question(self, asked: Float64[np.ndarray, "n d"]) -> Question:
        """Context and rows of every member as the network takes them."""
        device = pick_device(self.device)
        network = self.network_.to(device).eval()
        views = {power: Preparation(self.table_, power) for power in sorted({m.power for m in self.members_})}
        tables = [
            {power: view(table, network.columns) for power, view in views.items()} for table in (self.table_, asked)
        ]
        unused = network.columns - tables[0][self.members_[0].power].shape[1]
        context, rows = (
            torch.stack([pad(table[m.power].roll(-m.columns, 1), (0, unused)) for m in self.members_]).to(device)
            for table in tables
        )
        count, codes = len(self.classes_), torch.from_numpy(self.codes_)
        labels = torch.stack([(codes + m.classes) % count for m in self.members_]).to(device)
        orders = torch.stack([(torch.arange(count) + m.classes) % count for m in self.members_]).to(device)
        return Question(network, context, labels, rows, orders)

    @torch.no_grad()
    def _logits(self, X: Any) -> Float64[Tensor, "n classes"]:
        question, outputs = self._question(numbers(self._columns(X), self.fields_)), []
        pieces = question.split(self._group())
        memories: Iterable[list[Memory]] = (piece.memories() for piece in pieces)
        if 2 * len(self.network_.layers) * self.network_.encoder.out_features * question.labels.numel() <= CACHED:
            memories = self._memories_of(self.table_, question.rows.device, partial(list, memories))
        with bars(self.verbose) as progress:
            for piece, kept in zip(progress(pieces, "members", len(pieces)), memories, strict=True):
                step = max(1, TOKENS // len(piece.rows))
                outputs.append(torch.cat([piece.logits(rows, kept) for rows in piece.rows.split(step, 1)], 1))
        logits = torch.cat(outputs).double().mean(0).cpu()
        if not logits.isfinite().all():
            raise ValueError("X holds values too large for the network")
        return logits

    def _group(self) -> int:
        """How many members are computed at a time."""
        return max(1, TOKENS // len(self.table_))

    def _check(self) -> None:
        check_sizes(self, ("ensemble",))

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        members = [list(member) for member in self.members_]
        facts = {**self._column_facts(), "classes": label_facts(self.classes_), "members": members}
        return facts, {"context.table": torch.from_numpy(self.table_), "context.codes": torch.from_numpy(self.codes_)}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], ContextNetwork], int]:
        self.table_, self.codes_ = tensors.pop("context.table").numpy(), tensors.pop("context.codes").numpy()
        self._take_columns(facts, targets=0)
        self.classes_ = classes_of(facts["classes"])
        self.members_ = [Member(int(by_class), int(by_column), bool(p)) for by_class, by_column, p in facts["members"]]
        if self.table_.shape != (len(self.codes_), len(self.fields_)) or not 0 < len(self.codes_) <= ROWS:
            raise ValueError("the training rows do not match the columns")
        if not self.members_ or not ((self.codes_ >= 0) & (self.codes_ < len(self.classes_))).all():
            raise ValueError("the training rows do not match the classes")
        sizes = sizes_of({name.removeprefix(self._prefix): tensor for name, tensor in tensors.items()})
        columns, *_, depth, classes = sizes
        if len(self.fields_) > columns or len(self.classes_) > classes:
            raise ValueError("the network is too small for the table")
        return lambda: ContextNetwork(*sizes), depth


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
