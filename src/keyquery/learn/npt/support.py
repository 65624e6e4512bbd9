"""What the estimators of tables share: a support set of training rows, which new rows attend to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Shaped

from keyquery.learn.base import SavedEstimator, check_is_fitted
from keyquery.learn.inputs.tables import Columns, Field, check_features, columns_of
from keyquery.learn.npt.explanation import Effects, by_attention
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_count

MEMORIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # outside, so that predict changes no estimator


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
            "provenance": provenance(
                tensors=digests(self.network_.state_dict()),
                estimator=repr(type(self)(**self.params_)),
                context=len(numbers),
            ),
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
