"""Two factors, one at a time: are test rows in the table in training, and are targets of other rows visible?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keyquery.learn.data.tables import Table
from keyquery.learn.inputs.tables import Field
from keyquery.learn.npt.training import Plan, Samples
from keyquery_studies.common.store import result_name
from keyquery_studies.datapoints.folds import Fold
from keyquery_studies.datapoints.trial import TableTrial, samples_of

CELLS = ((False, False), (False, True), (True, False), (True, True))  # transductive, masked


@dataclass(frozen=True, kw_only=True)
class GridTrial(TableTrial):
    """A network of the inductive protocol, changed in one or both factors.

    `transductive`: the features of test rows are in the table in training, and in the support set, without targets.
    `masked`: every target is masked, in training and in the support set; otherwise half of them in training and none in
    the support set. Columns are standardised over training and validation rows in all four.
    """

    transductive: bool = False
    masked: bool = False

    @property
    def name(self) -> str:
        """The name of its result file."""
        cell = cell_of(self.transductive, self.masked).replace(", ", "-")
        return result_name((self.table, cell, self.fold), self._settings())

    def plan(self) -> Plan:
        """The training plan."""
        return replace(super().plan(), target_share=1.0) if self.masked else super().plan()

    def samples(self, table: Table, fold: Fold) -> tuple[Samples, list[Field]]:
        """The rows; if transductive also those of the test split, whose targets are hidden for good."""
        samples, fields = samples_of(table, fold, "inductive")
        if not self.transductive:
            return samples, fields
        hidden = samples.rows.hidden.clone()
        hidden[fold.test, -1] = True
        return replace(samples, rows=samples.rows._replace(hidden=hidden), bare=fold.test), fields


def cell_of(transductive: bool, masked: bool) -> str:
    """What a cell of the grid is called."""
    return f"{'transductive' if transductive else 'inductive'}, {'masked' if masked else 'shown'}"
