"""What NPTClassifier and NPTRegressor share: all but what a target is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from keyquery.capture.load import pick_device
from keyquery.data.tables import Table
from keyquery.estimators.base import (
    Estimator,
    check_sizes,
    filled,
    hold_out,
    is_missing,
    read_fitted,
    seed_of,
    seeded,
    write_fitted,
)
from keyquery.estimators.inputs.tables import Field, Rows, check_features, columns_of, encode, fields_of, named
from keyquery.estimators.npt.explanation import NPTExplanation, lean
from keyquery.estimators.npt.memory import require_room
from keyquery.estimators.npt.network import TableNetwork
from keyquery.estimators.npt.training import Plan, Samples, answers, learn, seen_by, stratified
from keyquery.layers.datapoints import ROWS, Memory
from keyquery.layers.kernels import KERNELS
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars

Own = TypeVar("Own", bound="Datapoints")


class Coded(NamedTuple):
    """The targets that are there, as a column of the table."""

    field: Field
    values: Float[np.ndarray, " n"]
    codes: Int[np.ndarray, " n"]


class Read(NamedTuple):
    """A context as it was read, and of which weights and rows that is, each with how often it was written to."""

    device: torch.device
    of: list[tuple[ReferenceType[Tensor], int]]
    memories: list[Memory]

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether it is of these tensors, as they are now."""
        pairs = zip(self.of, tensors, strict=False)
        same = all(one() is tensor and count == tensor._version for (one, count), tensor in pairs)
        return same and len(self.of) == len(tensors)


READ: WeakKeyDictionary[Datapoints, Read] = WeakKeyDictionary()  # apart from estimators, which predicting leaves as is


class Datapoints(Estimator, ABC):
    """A table, and a context of its rows that predictions attend to."""

    plan: ClassVar[Plan] = Plan()
    network_: TableNetwork
    fields_: list[Field]  # of all columns, the target last
    context_: Rows  # rows that predictions attend to, with their targets
    context_rows_: Shaped[np.ndarray, " m"]  # where those stood in X
    history_: list[dict[str, float]]
    n_features_in_: int
    feature_names_in_: Shaped[np.ndarray, " d"]  # where X told them

    def __init__(
        self,
        embedding: int = 64,
        depth: int = 8,
        heads: int = 8,
        steps: int = 2000,
        kernel: str = "general",
        row_attention: str = "full",
        semi_supervised: bool = False,
        context: int | str | None = None,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.embedding, self.depth, self.heads, self.steps = embedding, depth, heads, steps
        self.kernel, self.row_attention, self.semi_supervised = kernel, row_attention, semi_supervised
        self.context, self.random_state, self.device, self.verbose = context, random_state, device, verbose

    def fit(self: Own, X: Any, y: Any = None) -> Own:
        """Learn from a table and a target for each of its rows; y may be left out where X is a `kq.data.Table`."""
        self._check()
        device, columns = pick_device(self.device), columns_of(X)
        count = len(columns.values[0])
        y = target_of(X) if y is None else y
        there = self._there(y, count)
        some = y if there.all() else [value for value, is_there in zip(y, there, strict=True) if is_there]
        given = self._given(some, int(there.sum()))
        if len(given) < 2:
            raise ValueError(
                f"X has {count} sample(s), {len(given)} of them with a target, and at least 2 are required: rows "
                "attend to other rows"
            )
        seed = seed_of(self.random_state)
        share = self.plan.holdout if len(given) >= self.plan.least else 0.0
        learned, held = hold_out(self._strata(given), share, seed)
        coded = self._coded(given, learned)
        fields = [*fields_of(columns), coded.field]
        samples = self._samples(encode(columns, fields[:-1]), coded, there, learned, held)
        network, history = self._learned(fields, samples, device, seed)
        chosen = self._chosen(samples, seed)
        self.network_, self.fields_, self.history_ = network, fields, history
        self.context_, self.context_rows_ = seen_by(self.plan, samples.rows.take(chosen)), chosen
        self._keep_columns(columns.names, len(columns.values))
        self._keep(given)
        self.params_ = self._plain_params()
        return self

    def _learned(
        self, fields: list[Field], samples: Samples, device: str, seed: int
    ) -> tuple[TableNetwork, list[dict[str, float]]]:
        sizes, seen = [field.size for field in fields], len(samples.learned) + len(samples.bare)
        most = None if self.row_attention == "induced" else self.plan.batch
        rows = seen if most is None else min(seen, most)
        shape = (len(fields), self.embedding, self.depth, self.heads, sum(sizes))
        thrifty = require_room(*shape, rows, self.row_attention, device)
        with seeded(seed, device), bars(self.verbose) as progress:
            network = self._network(sizes, thrifty=thrifty).to(device)
            samples = replace(samples, rows=samples.rows.to(device))
            history = learn(network, samples, self.plan, self.steps, most, seed, progress)
        return network, history

    def explain(self, row: Any, rows: int = 10) -> NPTExplanation:
        """Which training rows and which columns the prediction of one row leans on, as a Reading with a picture.

        A row's attention is the mean over layers and heads. Its effect, and a column's, is by how much the prediction
        changes without it: of a class its log-odds, of a number the number itself. Without a column: its entry of
        `row` is hidden. Without a training row: the context is read without it; that is tried for the `rows` which
        have the most attention.
        """
        check_count("rows", rows, least=0)
        data = self._rows(row)
        if len(data.hidden) != 1:
            raise ValueError(f"row must be one row of a table, such as X[:1], got {len(data.hidden)}")
        network, context = self.network_.to(data.hidden.device).eval(), self.context_.to(data.hidden.device)
        with bars(self.verbose) as progress:
            found = lean(network, context, data, rows, self._odds, progress)
        names = [field.name for field in self.fields_[:-1]]
        shown = [self._entry(column, context) for column in range(len(names) + 1)]
        asked = [self._entry(column, data)[0] for column in range(len(names))]
        return NPTExplanation(
            **self._told(found.said),
            own=found.own,
            columns=[
                {"column": name, "value": value, "effect": effect}
                for name, value, effect in zip(names, asked, found.columns, strict=True)
            ],
            rows=[
                {
                    "row": int(self.context_rows_[place]),
                    "attention": found.attention[place],
                    "effect": found.rows.get(place),
                    "target": shown[-1][place],
                    "values": [column[place] for column in shown[:-1]],
                }
                for place in found.order
            ],
            provenance=provenance(
                tensors=digests(self.network_.state_dict()),
                estimator=repr(type(self)(**self.params_)),
                context=len(self.context_rows_),
            ),
        )

    def save(self, path: str | Path) -> None:
        """Write everything that predicting needs into one safetensors file: the rows of the context are in it."""
        self._check_fitted()
        facts = {
            "params": self.params_,
            "fields": [
                [f.name, f.mean, f.scale, None if f.categories is None else list(f.categories)] for f in self.fields_
            ],
            "history": self.history_,
            "named": hasattr(self, "feature_names_in_"),
            "published": self.plan.published,
            "points": self.plan.points,
            **self._facts(),
        }
        tensors = {f"network.{name}": tensor for name, tensor in self.network_.state_dict().items()}
        tensors |= {f"context.{name}": part for name, part in self.context_._asdict().items()}
        tensors["context.rows"] = torch.from_numpy(self.context_rows_)
        write_fitted(path, type(self).__name__, facts, tensors)

    @classmethod
    def load(cls: type[Own], path: str | Path, device: str | torch.device = "auto") -> Own:
        """The estimator of a file that `save` wrote, to run on `device`."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            made = cls(**{**facts["params"], "device": device})
            made._check()
            made.params_, made.history_ = facts["params"], list(facts["history"])
            made.fields_ = [
                Field(str(name), float(mean), float(scale), None if of is None else tuple(map(str, of)))
                for name, mean, scale, of in facts["fields"]
            ]
            if not all(math.isfinite(field.mean) and math.isfinite(field.scale) for field in made.fields_):
                raise ValueError("the means and scales of its columns hold NaN or infinity")
            made._take_context(tensors)
            made._take(facts)
            names = [field.name for field in made.fields_[:-1]]
            made._keep_columns(names if facts["named"] else None, len(names))
            weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            shape = {"published": bool(facts["published"]), "points": int(facts["points"])}
            sizes = [field.size for field in made.fields_]
            made.network_ = filled(lambda: made._network(sizes, **shape), weights, made.depth)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _check(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("row_attention", self.row_attention, ROWS)
        check_sizes(self, ("embedding", "depth", "heads", "steps"))
        if self.embedding % self.heads:
            raise ValueError(f"heads must divide embedding: {self.heads} does not divide {self.embedding}")
        if not isinstance(self.semi_supervised, (bool, np.bool_)):
            raise TypeError(f"semi_supervised must be True or False, got {self.semi_supervised!r}")
        if isinstance(self.context, str):
            check_choice("context", self.context, ("all",))
        else:
            check_count("context", self.context, least=1, optional=True)

    def _there(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        """Which rows have a target; without `semi_supervised` all must."""
        if y is None or np.ndim(y) != 1 or len(y) != count:
            return np.ones(count, dtype=bool)  # what is wrong with it is told later
        there = np.array([value is not np.ma.masked and not is_missing(value) for value in y])
        if not self.semi_supervised and not there.all():
            raise ValueError(
                f"y must have a target for every row, and row {there.argmin()} has none: "
                "with semi_supervised=True such rows are learned from without one"
            )
        if not there.any():
            raise ValueError(f"y holds no target at all: all {count} are missing")
        return there

    def _samples(self, rows: Rows, coded: Coded, there: np.ndarray, learned: np.ndarray, held: np.ndarray) -> Samples:
        """The table with its targets; `learned` and `held` are places among those that have one."""
        count, known = len(there), np.flatnonzero(there)
        values, codes = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.int64)
        values[known], codes[known] = coded.values, coded.codes
        last = (torch.from_numpy(values), torch.from_numpy(codes), torch.from_numpy(~there))
        whole = Rows(*(torch.cat((part, own.unsqueeze(1)), 1) for part, own in zip(rows, last, strict=True)))
        bare = np.concatenate((known[held], np.flatnonzero(~there))) if self.semi_supervised else held[:0]
        return Samples(whole, known[learned], known[held], bare)

    def _chosen(self, samples: Samples, seed: int) -> np.ndarray:
        """Rows of the context: those learned from and those without a target, a sample of them, or with "all" more."""
        learned, bare = samples.learned, np.setdiff1d(samples.bare, samples.held)
        if self.context == "all":
            learned = np.sort(np.concatenate((learned, samples.held)))
        chosen = np.concatenate((learned, bare))
        if isinstance(self.context, str) or self.context is None or int(self.context) >= len(chosen):
            return chosen
        last = (samples.rows.codes + samples.rows.values)[chosen, -1].double().numpy()  # one of the two is 0
        last[len(learned) :] = np.inf  # no target is a stratum, too
        return chosen[stratified(last, int(self.context), seed)]

    def _network(self, sizes: list[int], **shape: Any) -> TableNetwork:
        options = {"published": self.plan.published, "points": self.plan.points, **shape}
        options |= {"kernel": self.kernel, "rows": self.row_attention, "dropout": self.plan.dropout}
        return TableNetwork(sizes, self.embedding, self.depth, self.heads, **options)

    def _take_context(self, tensors: dict[str, Tensor]) -> None:
        self.context_ = Rows(*(tensors.pop(f"context.{name}") for name in Rows._fields))
        self.context_rows_ = tensors.pop("context.rows").numpy()
        shape = (len(self.context_rows_), len(self.fields_))
        if any(part.shape != shape for part in self.context_) or self.context_.hidden.dtype != torch.bool:
            raise ValueError("its context is not of its columns")
        most = torch.tensor([max(field.size, 1) for field in self.fields_])
        if (self.context_.codes < 0).any() or (self.context_.codes >= most).any():
            raise ValueError("its context has categories that its columns do not have")
        if not self.context_.values.isfinite().all():
            raise ValueError("its context holds NaN or infinity")

    def _rows(self, X: Any) -> Rows:
        """New rows, their targets hidden, on the device."""
        self._check_fitted()
        columns = columns_of(X)
        known = getattr(self, "feature_names_in_", None)
        check_features(type(self).__name__, (known, self.n_features_in_), (columns.names, len(columns.values)))
        rows = encode(columns, self.fields_[:-1])
        n = len(rows.hidden)
        last = (rows.values.new_zeros(n, 1), rows.codes.new_zeros(n, 1), rows.hidden.new_ones(n, 1))
        whole = Rows(*(torch.cat(pair, 1) for pair in zip(rows, last, strict=True)))
        return whole.to(pick_device(self.device))

    def _memories(self, device: torch.device) -> list[Memory]:
        """The context as new rows see it, read once, and again where weights have changed."""
        network = self.network_.to(device).eval()
        found, tensors = READ.get(self), [*network.parameters(), *self.context_]
        if found is None or found.device != device or not found.holds(tensors):
            memories = network.memories(self.context_.to(device).within())
            found = READ[self] = Read(device, [(ref(tensor), tensor._version) for tensor in tensors], memories)
        return found.memories

    def _answers(self, X: Any) -> Float64[Tensor, "n k"]:
        data = self._rows(X)
        memories = self._memories(data.hidden.device)
        with bars(self.verbose) as progress:
            found = answers(self.network_.to(data.hidden.device).eval(), data, memories, progress=progress)
        if not found.isfinite().all():
            most = float(data.values.abs().max())
            raise ValueError(f"X holds values too large: up to {most:.0e} standard deviations of the training data")
        return found.double().cpu()

    def _entry(self, column: int, rows: Rows) -> list[Any]:
        """A column of rows as the user knows it, None where it is hidden."""
        field = self.fields_[column]
        hidden = rows.hidden[:, column].tolist()
        if field.categories:
            names = self._names() if column == len(self.fields_) - 1 else field.categories
            return [None if h else names[c] for h, c in zip(hidden, rows.codes[:, column].tolist(), strict=True)]
        numbers = (rows.values[:, column].double() * field.scale + field.mean).tolist()
        return [None if h else number for h, number in zip(hidden, numbers, strict=True)]

    # What a target is, each estimator says for itself.

    @abstractmethod
    def _given(self, y: Any, count: int) -> Shaped[np.ndarray, " n"]:
        """Targets, checked."""

    @abstractmethod
    def _strata(self, given: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        """What rows are held out by."""

    @abstractmethod
    def _coded(self, given: Shaped[np.ndarray, " n"], learned: Int[np.ndarray, " some"]) -> Coded:
        """Targets as a column; what is learned from them, from those that are learned from."""

    def _keep(self, given: Shaped[np.ndarray, " n"]) -> None:
        """What a fit has learned of targets besides."""

    def _names(self) -> list[Any]:
        """Of classes, as JSON holds them."""
        return []

    def _facts(self) -> dict[str, Any]:
        """What else a file must hold."""
        return {}

    def _take(self, facts: Mapping[str, Any]) -> None:
        """The same out of a file."""

    @abstractmethod
    def _odds(self, said: Float64[Tensor, "n k"], chosen: int) -> Float64[Tensor, " n"]:
        """What an effect is a difference of."""

    @abstractmethod
    def _told(self, said: Float64[Tensor, " k"]) -> dict[str, Any]:
        """What a prediction says, for a NPTExplanation."""


def target_of(X: Any) -> Any:
    """The target of a `kq.data.Table`."""
    if not isinstance(X, Table) or X.target is None:
        return None
    values = X.values[X.target]
    return named(values, X.categories[X.target]) if X.kinds[X.target] == "categorical" else values
