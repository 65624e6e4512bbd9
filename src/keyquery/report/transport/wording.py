"""Explanations of a path compared with optimal transport, for the terminal and the page."""

from __future__ import annotations

from keyquery.instruments.transport.head_energies import SKEW
from keyquery.instruments.transport.transport import Transport

MOST = 30  # classes and heads that are listed
LIMIT = f"{SKEW:g}".replace("-", "−")


def recorded(reading: Transport) -> str:
    """The number of points and of recorded steps."""
    records = reading.provenance.get("records", len(reading.steps))
    until = f", up to {reading.unit} {reading.steps[-1]:,}" if reading.steps else ""
    return f"{reading.points:,} points, recorded {records:,} times{until}"


def notes(reading: Transport) -> list[str]:
    """Explanations of the metrics."""
    lines = [
        "distance: root mean square from start to end; optimal: the minimum over matchings within classes;",
        "random: a random matching; if it is close to optimal, an optimality near 1 is not informative;",
        "efficiency: straightness of the path; matched: share of points that are matched to themselves.",
    ]
    if reading.published:
        lines = [
            "Released definition, for comparison: sums over points and classes; a straight path scores far below 1."
        ]
    if not reading.exact:
        bounds = (f"{row['class']}: {row['least']:.4g}" for row in reading.classes if not row["exact"])
        lines.append(f"optimal is computed by Sinkhorn, an upper bound; lower bounds: {', '.join(bounds)}.")
    return lines


def heads_notes(reading: Transport) -> list[str]:
    """The heads that became skew, and since when."""
    if not reading.heads:
        return []
    skew = sorted((head for head in reading.heads if head["since"] is not None), key=lambda head: head["since"])
    if not skew:
        return [f"None of {len(reading.heads)} heads ends skew (symmetry {LIMIT} or below)."]
    each = ", ".join(f"{head['layer']}.{head['head']} since {head['since']:,}" for head in skew[:MOST])
    more = f" and {len(skew) - MOST} more" if len(skew) > MOST else ""
    share = f"{len(skew)} of {len(reading.heads)} heads end skew"
    return [f"{share} (symmetry {LIMIT} or below), by {reading.unit}: {each}{more}."]
