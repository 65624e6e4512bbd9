"""Covariates of events and groups: columns of any kind as inputs of the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32

from keyquery.learn.inputs.event_streams import Stream
from keyquery.learn.inputs.tables import Columns, Field, check_features, columns_of, encode, fields_of

BINS = 8  # of the piecewise-linear encoding of a number
Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CovariateCode:
    """The encoding of a table of covariates, k numbers per row.

    A number x has up to 8 inputs clamp((x − c_k)/(c_{k+1} − c_k), 0, 1) with knots c at quantiles of the training data,
    so that outliers and units do not matter; a category has one input per value. Means of the training data are
    subtracted, and one more input per column says where it is missing: such an entry is the average one.
    """

    fields: tuple[Field, ...]
    knots: Rows  # none for categories
    means: Rows
    named: bool

    @classmethod
    def learn(cls, table: Any) -> CovariateCode:
        """Knots, categories and means of a table."""
        columns = columns_of(table)
        fields, knots, shares = fields_of(columns), list[tuple[float, ...]](), np.linspace(0, 1, BINS + 1)
        for field, values in zip(fields, columns.values, strict=True):
            known = values[~np.isnan(values)] if field.categories is None else values[:0]
            quantiles = np.unique(np.quantile(known, shares, method="inverted_cdf")) if len(known) else known
            knots.append(tuple(map(float, quantiles)))
        bare = cls(tuple(fields), tuple(knots), (), columns.names is not None)
        parts = bare._parts(columns)
        means = (part[~missing].sum(0) / max((~missing).sum(), 1) for part, missing in parts)
        return replace(bare, means=tuple(tuple(map(float, row)) for row in means))

    @property
    def size(self) -> int:
        """Number of inputs."""
        return sum(len(means) + 1 for means in self.means)

    @property
    def blank(self) -> Float32[np.ndarray, " k"]:
        """The inputs of a row of which nothing is known."""
        return np.concatenate([[0.0] * len(means) + [1.0] for means in self.means]).astype(np.float32)

    def encode(self, columns: Columns) -> Float32[np.ndarray, "n k"]:
        """Inputs (n, k)."""
        names = [field.name for field in self.fields] if self.named else None
        check_features("EventModel", (names, len(self.fields)), (columns.names, len(columns.values)))
        parts = []
        for (part, missing), mean in zip(self._parts(columns), self.means, strict=True):
            parts += [np.where(missing[:, None], 0.0, part - mean), missing[:, None]]
        return np.concatenate(parts, 1).astype(np.float32)

    def _parts(self, columns: Columns) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each column before its mean is subtracted, and where it is missing."""
        rows, parts = encode(columns, self.fields), []
        for index, (field, knots) in enumerate(zip(self.fields, self.knots, strict=True)):
            missing = rows.hidden[:, index].numpy()
            if field.categories is None:
                cuts, numbers = np.array(knots), np.where(missing, 0.0, columns.values[index].astype(np.float64))
                part = ((numbers[:, None] - cuts[:-1]) / np.diff(cuts)).clip(0, 1)
            else:
                part = (rows.codes[:, index, None].numpy() == np.arange(field.size)).astype(np.float64)
            parts.append((part, missing))
        return parts

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        fields = [[field.name, field.categories and list(field.categories)] for field in self.fields]
        return {"fields": fields, "knots": self.knots, "means": self.means, "named": self.named}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> CovariateCode:
        """From the JSON of `facts`; raises ValueError for facts that no fit produces."""
        fields = tuple(
            Field(str(name), categories=None if of is None else tuple(map(str, of))) for name, of in facts["fields"]
        )
        knots, means = (tuple(tuple(map(float, row)) for row in facts[name]) for name in ("knots", "means"))
        widths = [
            max(len(row) - 1, 0) if field.categories is None else field.size
            for field, row in zip(fields, knots, strict=True)
        ]
        rising = all((np.diff(row) > 0).all() for row in knots)
        if [len(row) for row in means] != widths or not rising or not np.isfinite(np.concatenate(knots + means)).all():
            raise ValueError("covariates do not have the knots and means of their columns")
        return cls(fields, knots, means, bool(facts["named"]))


@dataclass(frozen=True)
class Described:
    """The encodings of the covariates of events and of groups, either of which may be absent."""

    events: CovariateCode | None = None
    groups: CovariateCode | None = None

    @classmethod
    def learn(cls, events: Any, groups: Any) -> Described:
        """From tables, or None."""
        return cls(*(None if table is None else CovariateCode.learn(table) for table in (events, groups)))

    @property
    def size(self) -> int:
        """Number of inputs per event."""
        return sum(code.size for code in (self.events, self.groups) if code is not None)

    def encode(self, events: Any, groups: Any, stream: Stream) -> Float32[np.ndarray, "n k"] | None:
        """Inputs of each event of a stream, from tables with a row per event and per group."""
        parts = []
        for name, code, table, rows in (
            ("covariates", self.events, events, stream.rows),
            ("group_covariates", self.groups, groups, stream.owners),
        ):
            if (table is None) != (code is None):
                state = "left out: it was fitted without them" if code is None else "given: it was fitted with them"
                raise ValueError(f"{name} must be {state}")
            if code is not None:
                columns, count = columns_of(table), int(rows.max()) + 1
                if len(columns.values[0]) != count:
                    row = "event" if table is events else "group, in order of first appearance"
                    raise ValueError(f"{name} must have {count} rows, one per {row}, got {len(columns.values[0])}")
                parts.append(code.encode(columns)[rows])
        return np.concatenate(parts, 1) if parts else None

    def unknown(self, inputs: Float32[np.ndarray, "*rows k"]) -> Float32[np.ndarray, "*rows k"]:
        """Inputs of further events of the same groups: the covariates of the groups, and unknown ones of events."""
        blank = inputs.copy()
        if self.events is not None:
            blank[..., : self.events.size] = self.events.blank
        return blank

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        codes = {"events": self.events, "groups": self.groups}
        return {name: None if code is None else code.facts() for name, code in codes.items()}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Described:
        """From the JSON of `facts`."""
        codes = (facts["events"], facts["groups"])
        return cls(*(None if code is None else CovariateCode.of_facts(code) for code in codes))
