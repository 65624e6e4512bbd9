"""Causal discovery with hidden causes: tests of independence in, a partial ancestral graph out."""

from keyquery.learn.discovery.independence import (
    TOLERANCE,
    CountedTest,
    DSeparation,
    PartialCorrelation,
    ProbabilityTest,
    Query,
    Test,
    correlation_of,
)
from keyquery.learn.discovery.knowledge import Knowledge, knowledge_of
from keyquery.learn.discovery.pag import MARKS, Edge, Pag, later_nodes, members
from keyquery.learn.discovery.rules import Separations, orient
from keyquery.learn.discovery.search import Found, expected_seconds, fci, icd, icd_rounds
from keyquery.learn.discovery.trees import closed_sets, depths

__all__ = [
    "MARKS",
    "TOLERANCE",
    "CountedTest",
    "DSeparation",
    "Edge",
    "Found",
    "Knowledge",
    "Pag",
    "PartialCorrelation",
    "ProbabilityTest",
    "Query",
    "Separations",
    "Test",
    "closed_sets",
    "correlation_of",
    "depths",
    "expected_seconds",
    "fci",
    "icd",
    "icd_rounds",
    "knowledge_of",
    "later_nodes",
    "members",
    "orient",
]
