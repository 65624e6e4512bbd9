"""Base classes of the estimators of tables whose rows attend to training rows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from keyquery.layers.kernels import KERNELS
from keyquery.learn.base import Classifier, SavedEstimator, check_is_fitted, check_sizes, hold_out, seed_of, seeded
from keyquery.learn.fitting import fit_network
from keyquery.learn.inputs.tables import Columns, Field, Rows, check_features, columns_of, encode, fields_of, target_of
from keyquery.learn.inputs.targets import classes_of, is_missing, kept_of, label_facts, weights_of
from keyquery.learn.layers.datapoints import ROWS
from keyquery.learn.npt.explanation import Effects, NPTExplanation, attribute, by_attention
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, answers, drawing, judged, table_loss
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import bars

Coded = tuple[Field, Shaped[np.ndarray, " n"]]  # of the target: codes of classes, or standardised numbers
MEMORIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # outside, so that predict changes no estimator
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # on a GPU and on a CPU


class SupportSet(SavedEstimator):
    """An estimator whose new rows attend to training rows, and never to each other."""

    fields_: list[Field]
    n_features_in_: int
    feature_names_in_: Shaped[np.ndarray, " d"]  # if X has column names

    def _columns(self, X: Any) -> Columns:
        """The columns of new rows."""
        check_is_fitted(self)
        columns = columns_of(X)
        known = getattr(self, "feature_names_in_", None)
        check_features(type(self).__name__, (known, self.n_features_in_), (columns.names, len(columns.values)))
        return columns

    def _one_row(self, row: Any, rows: int) -> Columns:
        """The row to explain."""
        check_count("rows", rows, least=0)
        columns = self._columns(row)
        if (count := len(columns.values[0])) != 1:
            raise ValueError(f"row must be a table with one row, such as X[:1], got {count} rows")
        return columns

    def _explained(
        self, effects: Effects, entries: Sequence[Any], table: Sequence[Sequence[Any]], numbers: np.ndarray
    ) -> dict[str, Any]:
        """Fields of an explanation, from entries of the row, and columns of the table, target last, and row numbers."""
        names = [field.name for field in self.fields_[: len(entries)]]
        columns = zip(names, entries, effects.columns, strict=True)
        return {
            "columns": [{"column": name, "value": value, "effect": effect} for name, value, effect in columns],
            "rows": [
                {
                    "row": int(numbers[row]),
                    "attention": float(effects.attention[row]),
                    **{part: float(scores[row]) for part, scores in effects.scores.items()},
                    "effect": effects.rows.get(row),
                    "target": table[-1][row],
                    "values": [column[row] for column in table[:-1]],
                }
                for row in by_attention(effects.attention)
            ],
            "provenance": self._provenance(context=len(numbers)),
        }

    def _memories_of(self, context: Any, device: torch.device, compute: Callable[[], list[Any]]) -> list[Any]:
        """Keys and values of the support set in every layer, which are kept for the next call."""
        kept = MEMORIES.get(self)
        if kept is None or not (kept[0] is self.network_ and kept[1] is context and kept[2] == device):
            kept = MEMORIES[self] = (self.network_, context, device, compute())
        return kept[3]

    def _column_facts(self) -> dict[str, Any]:
        """The columns as JSON."""
        rows = [[f.name, f.mean, f.scale, None if f.categories is None else list(f.categories)] for f in self.fields_]
        return {"fields": rows, "named": hasattr(self, "feature_names_in_")}

    def _take_columns(self, facts: Mapping[str, Any], targets: int) -> None:
        """Restore the columns, of which the last `targets` are no features."""
        self.fields_ = []
        for name, *statistics, of in facts["fields"]:
            mean, scale = map(float, statistics or (0, 1))  # files of former versions may have none
            self.fields_.append(Field(str(name), mean, scale, None if of is None else tuple(map(str, of))))
        if not all(math.isfinite(field.mean) and math.isfinite(field.scale) for field in self.fields_):
            raise ValueError("the means and scales of its columns hold NaN or infinity")
        names = [field.name for field in self.fields_[: len(self.fields_) - targets]]
        self._keep_columns(names if facts["named"] else None, len(names))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


@dataclass(eq=False, repr=False)
class Datapoints(SupportSet):
    """A table model; the last of its `fields_` is the target."""

    plan: ClassVar[Plan] = Plan()

    embedding: int = 32
    depth: int = 4
    heads: int = 8
    steps: int = 400
    lr: float | None = None
    validation_fraction: float = 0.2
    kernel: str = "general"
    row_attention: str = "full"
    semi_supervised: bool = False
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit to a table X, targets y (n,) and weights (n,)."""
        self._check()
        device, columns = pick_device(self.device), columns_of(X)
        count = len(columns.values[0])
        y = target_of(X, y)
        y = y if y is None or hasattr(y, "__len__") else np.asarray(y)
        kept = np.flatnonzero(weights_of(type(self).__name__, np.zeros(count), sample_weight))
        columns, y, count = columns.take(kept), kept_of(y, kept, count), len(kept)
        has_target = self._has_target(y, count)
        targets = self._targets(y if has_target.all() else kept_of(y, has_target, count), int(has_target.sum()))
        if len(targets) < 2:
            raise ValueError(
                f"X has {count} sample(s), {len(targets)} of them with a target, and at least 2 are required: rows "
                "attend to other rows"
            )
        weights = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)[kept][has_target]
        seed = seed_of(self.random_state)
        share = self.validation_fraction if len(targets) >= self.plan.least else 0.0
        learned, held = hold_out(targets if isinstance(self, Classifier) else np.zeros(len(targets)), share, seed)
        field, coded = self._coded(targets, learned)
        fields, known = [*fields_of(columns), field], np.flatnonzero(has_target)
        bare = np.concatenate((known[held], np.flatnonzero(~has_target))) if self.semi_supervised else held[:0]
        rows = with_target(encode(columns, fields[:-1]), known, coded)
        row_weights = self._weights(targets, known, weights, count)
        samples = Samples(rows, known[learned], known[held], bare, row_weights)
        self.network_, self.history_ = self._learned(fields, samples, device, seed)
        self.fields_, self.context_rows_ = fields, kept[samples.context]
        self.context_ = self.plan.shown(rows.take(samples.context))
        self._keep_columns(columns.names, len(columns.values))
        if isinstance(self, Classifier):
            self.classes_ = np.unique(targets)
        self.params_ = self._plain_params()
        return self

    def _learned(
        self, fields: Sequence[Field], samples: Samples, device: str, seed: int
    ) -> tuple[TableNetwork, list[dict[str, float]]]:
        """Train; again with activation checkpointing if memory does not suffice."""
        sizes = [field.size for field in fields]
        most = None if self.row_attention == "induced" else self.plan.batch
        plan = self.plan if self.lr is None else replace(self.plan, lr=self.lr)
        weights = None if samples.weights is None else samples.weights.to(device)
        samples = replace(samples, rows=samples.rows.to(device), weights=weights)
        for thrifty in (False, True):
            with seeded(seed, device), bars(self.verbose) as progress:
                try:
                    network = self._network(sizes, thrifty=thrifty).to(device)
                    log = fit_network(
                        network,
                        drawing(samples, network.sizes, plan, self.steps, most),
                        table_loss,
                        plan.recipe(self.steps, seed),
                        validate=partial(judged, samples=samples, plan=plan) if len(samples.held) else None,
                        progress=progress,
                        advice="a smaller lr, other steps or embedding may help",
                        verbose=self.verbose,
                    )
                except RuntimeError as error:
                    if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                        raise
                    continue
            names = {"step": "step", "loss": "loss", "validation": "validation_loss"}
            return network, [{names[key]: row[key] for key in names if key in row} for row in log.rows]
        wide = len(fields) * self.embedding
        raise MemoryError(
            f"training on {len(samples.rows.hidden):,} rows and {len(fields)} columns (including the target; width "
            f"{wide:,}) does not fit into memory. Halving the embedding quarters the weights; "
            'row_attention="induced" needs less memory for many rows'
        )

    def explain(self, row: Any, rows: int = 10) -> NPTExplanation:
        """Which training rows and columns the prediction of one row, such as X[:1], depends on.

        The attention to a training row is the mean over layers and heads. The effect of a row or column is the change
        of the prediction (log-odds of the class, or the value) when it is ablated: the entry of the column is masked,
        or the row is removed from the support set. Of rows only the `rows` with the most attention are ablated.
        """
        data = self._masked(self._one_row(row, rows))
        network, context = self.network_.to(data.hidden.device).eval(), self.context_.to(data.hidden.device)
        with bars(self.verbose) as progress:
            output, to_itself, effects = attribute(network, context, data, rows, self._odds, progress)
        table = [self._entries(column, context) for column in range(len(self.fields_))]
        entries = [self._entries(column, data)[0] for column in range(len(self.fields_) - 1)]
        return NPTExplanation(
            **self._prediction(output), own=to_itself, **self._explained(effects, entries, table, self.context_rows_)
        )

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        facts = self._column_facts()
        if isinstance(self, Classifier):
            facts["classes"] = label_facts(self.classes_)
        tensors = {f"context.{name}": part for name, part in self.context_._asdict().items()}
        return facts, tensors | {"context.rows": torch.from_numpy(self.context_rows_)}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], TableNetwork], int]:
        self._take_columns(facts, targets=1)
        if isinstance(self, Classifier):
            self.classes_ = classes_of(facts["classes"])
            if len(self.classes_) != self.fields_[-1].size:
                raise ValueError("the classes do not match the target column")
        self.context_ = Rows(*(tensors.pop(f"context.{name}") for name in Rows._fields))
        self.context_rows_ = tensors.pop("context.rows").numpy()
        shape = (len(self.context_rows_), len(self.fields_))
        if any(part.shape != shape for part in self.context_) or self.context_.hidden.dtype != torch.bool:
            raise ValueError("the support set does not match the columns")
        sizes = [field.size for field in self.fields_]
        categories = torch.tensor([max(size, 1) for size in sizes])
        if (self.context_.codes < 0).any() or (self.context_.codes >= categories).any():
            raise ValueError("the support set has categories that the columns do not have")
        if not self.context_.values.isfinite().all():
            raise ValueError("the support set holds NaN or infinity")
        return lambda: self._network(sizes), self.depth

    def _check(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("row_attention", self.row_attention, ROWS)
        check_sizes(self, ("embedding", "depth", "heads", "steps"), validation_fraction=1)
        if self.lr is not None:
            check_sizes(self, (), lr=math.inf)
        if self.embedding % self.heads:
            raise ValueError(f"heads must divide embedding: {self.heads} does not divide {self.embedding}")

    def _has_target(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        """Which rows have a target; all must, unless `semi_supervised`."""
        if y is None or np.ndim(y) != 1 or len(y) != count:
            return np.ones(count, dtype=bool)  # the error is raised later
        has_target = np.array([value is not np.ma.masked and not is_missing(value) for value in y])
        if not self.semi_supervised and not has_target.all():
            raise ValueError(
                f"y must have a target for every row, and row {has_target.argmin()} has none: "
                "set semi_supervised=True to train on rows without a target"
            )
        if not has_target.any():
            raise ValueError(f"y has no targets: all {count} are missing")
        return has_target

    def _weights(
        self, targets: np.ndarray, known: np.ndarray, given: np.ndarray | None, count: int
    ) -> Float[Tensor, " n"] | None:
        """The weight of each row in the loss of targets, with mean 1; None for equal weights."""
        by_class = getattr(self, "class_weight", None)
        if given is None and by_class is None:
            return None
        weights = torch.ones(count)
        weights[known] = torch.from_numpy(weights_of(type(self).__name__, targets, given, by_class)).float()
        return weights

    def _network(self, sizes: list[int], thrifty: bool = False) -> TableNetwork:
        options: dict[str, Any] = {
            "kernel": self.kernel,
            "rows": self.row_attention,
            "dropout": self.plan.dropout,
            "thrifty": thrifty,
        }
        return TableNetwork(sizes, self.embedding, self.depth, self.heads, **options)

    def _masked(self, columns: Columns) -> Rows:
        """New rows with masked targets, on the device."""
        return with_target(encode(columns, self.fields_[:-1])).to(pick_device(self.device))

    def _answers(self, X: Any) -> Float64[Tensor, "n k"]:
        data = self._masked(self._columns(X))
        device = data.hidden.device
        network = self.network_.to(device).eval()
        memories = self._memories_of(self.context_, device, lambda: network.memories(self.context_.to(device).within()))
        with bars(self.verbose) as progress:
            outputs = answers(network, data, memories, progress=progress)
        if not outputs.isfinite().all():
            most = float(data.values.abs().max())
            raise ValueError(f"X holds values too large: up to {most:.0e} standard deviations of the training data")
        return outputs.double().cpu()

    def _entries(self, column: int, rows: Rows) -> list[Any]:
        """A column in the user's units and categories, None where it is masked."""
        field, hidden = self.fields_[column], rows.hidden[:, column].tolist()
        values = (rows.values[:, column].double() * field.scale + field.mean).tolist()
        if field.categories:
            is_target = column == len(self.fields_) - 1
            names = label_facts(self.classes_)["labels"] if is_target else field.categories
            values = [names[code] for code in rows.codes[:, column].tolist()]
        return [None if masked else value for masked, value in zip(hidden, values, strict=True)]

    # Handling of the target, which differs between classifier and regressor.

    @abstractmethod
    def _targets(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        """Validated targets."""

    @abstractmethod
    def _coded(self, targets: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        """The target as a column, with statistics of the training split `learned`."""

    @abstractmethod
    def _odds(self, outputs: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        """The quantity whose change is an effect: log-odds of the class, or the predicted value."""

    @abstractmethod
    def _prediction(self, output: Float64[Tensor, " k"]) -> dict[str, Any]:
        """The prediction, for a NPTExplanation."""


def with_target(rows: Rows, known: Any = None, target: Shaped[np.ndarray, " some"] | None = None) -> Rows:
    """Rows with the target as a last column; it is masked in all rows but the `known` ones."""
    count = len(rows.hidden)
    last = Rows(rows.values.new_zeros(count, 1), rows.codes.new_zeros(count, 1), rows.hidden.new_ones(count, 1))
    if target is not None:
        column = last.codes if target.dtype.kind == "i" else last.values
        column[known, 0] = torch.from_numpy(target).to(column.dtype)
        last.hidden[known] = False
    return Rows(*(torch.cat(pair, 1) for pair in zip(rows, last, strict=True)))
