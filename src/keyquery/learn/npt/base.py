"""Base class of NPTClassifier and NPTRegressor."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from keyquery.layers.kernels import KERNELS
from keyquery.learn.base import SavedEstimator, check_is_fitted, check_sizes, hold_out, seed_of, seeded
from keyquery.learn.inputs.tables import Field, Rows, check_features, columns_of, encode, fields_of, target_of
from keyquery.learn.inputs.targets import is_missing, kept_of, rows_of_weight, weights_of
from keyquery.learn.layers.datapoints import ROWS, Memory
from keyquery.learn.npt.explanation import NPTExplanation, attribute
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, answers, learn, seen_by
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import bars

Own = TypeVar("Own", bound="Datapoints")
MEMORIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # outside, so that predict changes no estimator
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # on a GPU and on a CPU


class Coded(NamedTuple):
    """The non-missing targets, encoded as a column of the table."""

    field: Field
    values: Float[np.ndarray, " n"]
    codes: Int[np.ndarray, " n"]


class Datapoints(SavedEstimator):
    """A table model with a support set: training rows that predictions attend to."""

    plan: ClassVar[Plan] = Plan()
    network_: TableNetwork
    fields_: list[Field]  # of all columns, the target last
    context_: Rows  # the support set: rows that predictions attend to, with their targets
    context_rows_: Shaped[np.ndarray, " m"]  # their row numbers in X
    history_: list[dict[str, float]]
    n_features_in_: int
    feature_names_in_: Shaped[np.ndarray, " d"]  # if X has column names

    def __init__(
        self,
        embedding: int = 32,
        depth: int = 4,
        heads: int = 8,
        steps: int = 400,
        lr: float | None = None,
        validation_fraction: float = 0.2,
        kernel: str = "general",
        row_attention: str = "full",
        semi_supervised: bool = False,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.embedding, self.depth, self.heads, self.steps = embedding, depth, heads, steps
        self.lr, self.validation_fraction = lr, validation_fraction
        self.kernel, self.row_attention, self.semi_supervised = kernel, row_attention, semi_supervised
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self: Own, X: Any, y: Any = None, sample_weight: Any = None) -> Own:
        """Fit to a table X, targets y (n,) and weights (n,)."""
        self._check()
        device, columns = pick_device(self.device), columns_of(X)
        count = len(columns.values[0])
        y = target_of(X, y)
        y = y if y is None or hasattr(y, "__len__") else np.asarray(y)
        kept = rows_of_weight(type(self).__name__, sample_weight, count)
        sample_weight = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        if kept is not None:
            columns, y = columns.take(kept), kept_of(y, kept, count)
            sample_weight, count = sample_weight[kept], len(kept)
        has_target = self._has_target(y, count)
        targets = self._targets(y if has_target.all() else kept_of(y, has_target, count), int(has_target.sum()))
        if len(targets) < 2:
            raise ValueError(
                f"X has {count} sample(s), {len(targets)} of them with a target, and at least 2 are required: rows "
                "attend to other rows"
            )
        seed = seed_of(self.random_state)
        share = self.validation_fraction if len(targets) >= self.plan.least else 0.0
        learned, held = hold_out(self._strata(targets), share, seed)
        coded = self._coded(targets, learned)
        fields = [*fields_of(columns), coded.field]
        samples = self._samples(encode(columns, fields[:-1]), coded, has_target, learned, held)
        samples = replace(samples, weights=self._weights(targets, has_target, sample_weight))
        network, history = self._learned(fields, samples, device, seed)
        chosen = np.concatenate((samples.learned, np.setdiff1d(samples.bare, samples.held)))
        self.network_, self.fields_, self.history_ = network, fields, history
        self.context_ = seen_by(self.plan, samples.rows.take(chosen))
        self.context_rows_ = chosen if kept is None else kept[chosen]
        self._keep_columns(columns.names, len(columns.values))
        self._keep(targets)
        self.params_ = self._plain_params()
        return self

    def _learned(
        self, fields: list[Field], samples: Samples, device: str, seed: int
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
                    return network, learn(network, samples, plan, self.steps, most, seed, progress, self.verbose)
                except RuntimeError as error:
                    if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                        raise
        wide = len(fields) * self.embedding
        raise MemoryError(
            f"training on {len(samples.rows.hidden):,} rows and {len(fields)} columns (including the target; width "
            f"{wide:,}) does not fit into memory. Halving the embedding quarters the weights; "
            'row_attention="induced" needs less memory for many rows'
        )

    def explain(self, row: Any, rows: int = 10) -> NPTExplanation:
        """Which training rows and columns the prediction of one row depends on.

        The attention to a training row is the mean over layers and heads. The effect of a row or column is the change
        of the prediction (log-odds of the class, or the value) when it is ablated: the entry of the column is masked,
        or the row is removed from the support set.

        Parameters
        ----------
        row
            One row of a table, such as X[:1].
        rows
            How many training rows, those with the most attention, are ablated. Default: 10.

        Returns
        -------
        NPTExplanation
            A Reading; `.plot()` draws it.
        """
        check_count("rows", rows, least=0)
        data = self._rows(row)
        if len(data.hidden) != 1:
            raise ValueError(f"row must be a table with one row, such as X[:1], got {len(data.hidden)} rows")
        network, context = self.network_.to(data.hidden.device).eval(), self.context_.to(data.hidden.device)
        with bars(self.verbose) as progress:
            effects = attribute(network, context, data, rows, self._odds, progress)
        names = [field.name for field in self.fields_[:-1]]
        shown = [self._entry(column, context) for column in range(len(names) + 1)]
        return NPTExplanation(
            **self._prediction(effects.output),
            own=effects.own,
            columns=[
                {"column": name, "value": self._entry(column, data)[0], "effect": effects.columns[column]}
                for column, name in enumerate(names)
            ],
            rows=[
                {
                    "row": int(self.context_rows_[place]),
                    "attention": effects.attention[place],
                    "effect": effects.rows.get(place),
                    "target": shown[-1][place],
                    "values": [column[place] for column in shown[:-1]],
                }
                for place in effects.order
            ],
            provenance=provenance(
                tensors=digests(self.network_.state_dict()),
                estimator=repr(type(self)(**self.params_)),
                context=len(self.context_rows_),
            ),
        )

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        facts = {
            "fields": [
                [f.name, f.mean, f.scale, None if f.categories is None else list(f.categories)] for f in self.fields_
            ],
            "named": hasattr(self, "feature_names_in_"),
            "published": self.plan.published,
            "points": self.plan.points,
            **self._facts(),
        }
        tensors = {f"context.{name}": part for name, part in self.context_._asdict().items()}
        return facts, tensors | {"context.rows": torch.from_numpy(self.context_rows_)}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], TableNetwork], int]:
        self.fields_ = [
            Field(str(name), float(mean), float(scale), None if of is None else tuple(map(str, of)))
            for name, mean, scale, of in facts["fields"]
        ]
        if not all(math.isfinite(field.mean) and math.isfinite(field.scale) for field in self.fields_):
            raise ValueError("the means and scales of its columns hold NaN or infinity")
        self._take_context(tensors)
        self._take(facts)
        names = [field.name for field in self.fields_[:-1]]
        self._keep_columns(names if facts["named"] else None, len(names))
        shape = {"published": bool(facts["published"]), "points": int(facts["points"])}
        sizes = [field.size for field in self.fields_]
        return lambda: self._network(sizes, **shape), self.depth

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _check(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("row_attention", self.row_attention, ROWS)
        check_sizes(self, ("embedding", "depth", "heads", "steps"), validation_fraction=1)
        if self.lr is not None:
            check_sizes(self, (), lr=math.inf)
        if self.embedding % self.heads:
            raise ValueError(f"heads must divide embedding: {self.heads} does not divide {self.embedding}")
        if not isinstance(self.semi_supervised, (bool, np.bool_)):
            raise TypeError(f"semi_supervised must be True or False, got {self.semi_supervised!r}")

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

    def _samples(
        self, rows: Rows, coded: Coded, has_target: np.ndarray, learned: np.ndarray, held: np.ndarray
    ) -> Samples:
        """The table with its targets; `learned` and `held` index the rows that have one."""
        count, known = len(has_target), np.flatnonzero(has_target)
        values, codes = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.int64)
        values[known], codes[known] = coded.values, coded.codes
        last = (torch.from_numpy(values), torch.from_numpy(codes), torch.from_numpy(~has_target))
        whole = Rows(*(torch.cat((part, own.unsqueeze(1)), 1) for part, own in zip(rows, last, strict=True)))
        bare = np.concatenate((known[held], np.flatnonzero(~has_target))) if self.semi_supervised else held[:0]
        return Samples(whole, known[learned], known[held], bare)

    def _weights(self, targets: np.ndarray, has_target: np.ndarray, sample_weight: Any) -> Float[Tensor, " n"] | None:
        """The weight of each row in the loss of targets, with mean 1; None for equal weights."""
        by_class = getattr(self, "class_weight", None)
        if sample_weight is None and by_class is None:
            return None
        own = None if sample_weight is None else sample_weight[has_target]
        weights = np.ones(len(has_target))
        weights[has_target] = weights_of(type(self).__name__, targets, own, by_class)
        return torch.from_numpy(weights).float()

    def _network(self, sizes: list[int], **shape: Any) -> TableNetwork:
        options = {"published": self.plan.published, "points": self.plan.points, **shape}
        options |= {"kernel": self.kernel, "rows": self.row_attention, "dropout": self.plan.dropout}
        return TableNetwork(sizes, self.embedding, self.depth, self.heads, **options)

    def _take_context(self, tensors: dict[str, Tensor]) -> None:
        self.context_ = Rows(*(tensors.pop(f"context.{name}") for name in Rows._fields))
        self.context_rows_ = tensors.pop("context.rows").numpy()
        shape = (len(self.context_rows_), len(self.fields_))
        if any(part.shape != shape for part in self.context_) or self.context_.hidden.dtype != torch.bool:
            raise ValueError("the support set does not match the columns")
        most = torch.tensor([max(field.size, 1) for field in self.fields_])
        if (self.context_.codes < 0).any() or (self.context_.codes >= most).any():
            raise ValueError("the support set has categories that the columns do not have")
        if not self.context_.values.isfinite().all():
            raise ValueError("the support set holds NaN or infinity")

    def _rows(self, X: Any) -> Rows:
        """New rows with masked targets, on the device."""
        check_is_fitted(self)
        columns = columns_of(X)
        known = getattr(self, "feature_names_in_", None)
        check_features(type(self).__name__, (known, self.n_features_in_), (columns.names, len(columns.values)))
        rows = encode(columns, self.fields_[:-1])
        n = len(rows.hidden)
        last = (rows.values.new_zeros(n, 1), rows.codes.new_zeros(n, 1), rows.hidden.new_ones(n, 1))
        whole = Rows(*(torch.cat(pair, 1) for pair in zip(rows, last, strict=True)))
        return whole.to(pick_device(self.device))

    def _memories(self, device: torch.device) -> list[Memory]:
        """Keys and values of the support set in every layer, which are kept for the next call."""
        fitted = (self.network_, self.context_, device)
        kept = MEMORIES.get(self)
        if kept is None or kept[0][0] is not fitted[0] or kept[0][1] is not fitted[1] or kept[0][2] != device:
            memories = self.network_.to(device).eval().memories(self.context_.to(device).within())
            kept = MEMORIES[self] = (fitted, memories)
        return kept[1]

    def _answers(self, X: Any) -> Float64[Tensor, "n k"]:
        data = self._rows(X)
        memories = self._memories(data.hidden.device)
        with bars(self.verbose) as progress:
            outputs = answers(self.network_.to(data.hidden.device).eval(), data, memories, progress=progress)
        if not outputs.isfinite().all():
            most = float(data.values.abs().max())
            raise ValueError(f"X holds values too large: up to {most:.0e} standard deviations of the training data")
        return outputs.double().cpu()

    def _entry(self, column: int, rows: Rows) -> list[Any]:
        """A column in the user's units and categories, None where it is masked."""
        field = self.fields_[column]
        hidden = rows.hidden[:, column].tolist()
        if field.categories:
            names = self._names() if column == len(self.fields_) - 1 else field.categories
            return [None if h else names[c] for h, c in zip(hidden, rows.codes[:, column].tolist(), strict=True)]
        numbers = (rows.values[:, column].double() * field.scale + field.mean).tolist()
        return [None if h else number for h, number in zip(hidden, numbers, strict=True)]

    # Handling of the target, which differs between classifier and regressor.

    @abstractmethod
    def _targets(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        """Validated targets."""

    @abstractmethod
    def _strata(self, targets: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        """The strata of the validation split."""

    @abstractmethod
    def _coded(self, targets: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        """Targets as a column; statistics are those of the training split `learned`."""

    def _keep(self, targets: Shaped[np.ndarray, " n"]) -> None:
        """Set further fitted attributes of the target."""

    def _names(self) -> list[Any]:
        """Class labels as JSON."""
        return []

    def _facts(self) -> dict[str, Any]:
        """Further facts to save."""
        return {}

    def _take(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts of `_facts`."""

    @abstractmethod
    def _odds(self, outputs: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        """The quantity whose change is an effect: log-odds of the class, or the predicted value."""

    @abstractmethod
    def _prediction(self, output: Float64[Tensor, " k"]) -> dict[str, Any]:
        """The prediction, for a NPTExplanation."""
