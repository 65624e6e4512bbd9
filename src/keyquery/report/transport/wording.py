"""What a path beside optimal transport says in words, in the terminal and on the page."""

from __future__ import annotations

from keyquery.instruments.transport.head_energies import SKEW
from keyquery.instruments.transport.transport import Transport

MOST = 30  # classes, and heads, that are named
LIMIT = f"{SKEW:g}".replace("-", "−")


def recorded(reading: Transport) -> str:
    """How many points, and for how long."""
    records = reading.provenance.get("records", len(reading.steps))
    until = f", up to {reading.unit} {reading.steps[-1]:,}" if reading.steps else ""
    return f"{reading.points:,} points, recorded {records:,} times{until}"


def said(reading: Transport) -> list[str]:
    """What the figures mean, in words."""
    lines = [
        "distance: √(mean square from start to end); optimal: the least of any matching within classes;",
        "random: that of one drawn by lot; where it is near optimal, an optimality near 1 says little;",
        "efficiency: how straight the way was; matched: share of points that are their own partner.",
    ]
    if reading.published:
        lines = ["As released, for comparison: sums over points and classes; a straight path scores far below 1."]
    if not reading.exact:
        bounds = (f"{row['class']}: {row['least']:.4g}" for row in reading.classes if not row["exact"])
        lines.append(f"optimal is by Sinkhorn, an upper bound; it is at least, {', '.join(bounds)}.")
    return lines


def heads_said(reading: Transport) -> list[str]:
    """Which heads became skew, and when."""
    if not reading.heads:
        return []
    found = sorted((head for head in reading.heads if head["since"] is not None), key=lambda head: head["since"])
    if not found:
        return [f"None of {len(reading.heads)} heads ends skew (symmetry {LIMIT} or below)."]
    each = ", ".join(f"{head['layer']}.{head['head']} since {head['since']:,}" for head in found[:MOST])
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    share = f"{len(found)} of {len(reading.heads)} heads end skew"
    return [f"{share} (symmetry {LIMIT} or below), by {reading.unit}: {each}{more}."]
