"""Causal discovery with hidden causes: tests of independence in, a partial ancestral graph out."""
# ruff: noqa: I001

from keyquery.learn.discovery.independence import (
    TOLERANCE as TOLERANCE,
    CountedTest as CountedTest,
    DSeparation as DSeparation,
    PartialCorrelation as PartialCorrelation,
    ProbabilityTest as ProbabilityTest,
    Query as Query,
    Test as Test,
    correlation_of as correlation_of,
)
from keyquery.learn.discovery.knowledge import Knowledge as Knowledge, knowledge_of as knowledge_of
from keyquery.learn.discovery.pag import (
    MARKS as MARKS,
    Edge as Edge,
    Pag as Pag,
    later_nodes as later_nodes,
    members as members,
)
from keyquery.learn.discovery.rules import Separations as Separations, orient as orient
from keyquery.learn.discovery.search import (
    Found as Found,
    expected_seconds as expected_seconds,
    fci as fci,
    icd as icd,
    icd_rounds as icd_rounds,
)
from keyquery.learn.discovery.trees import closed_sets as closed_sets, depths as depths

__all__ = ["Pag"]  # what readings give; the other names are for tests of one's own and for benches
