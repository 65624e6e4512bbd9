"""A causal graph over columns as a picture: the ring of `kq.causes`."""

from __future__ import annotations

from typing import Any

from keyquery.instruments.discover.discover import Discovery
from keyquery.report.causes.figure import panels_figure
from keyquery.report.causes.layout import Ring, kinds_of, ring_of
from keyquery.report.causes.svg import drawing


def panel(reading: Discovery) -> Ring:
    """Variables on a ring; lines are thinner where few resamples have the edge."""
    note = f"{len(reading.edges)} edges, {reading.tests:,} tests" + ("" if reading.done else ", stopped early")
    seen, shares = reading.shares(), {}
    for i, j, _, _ in reading.pag().edges():
        share = seen.get((i, j), 0.0)
        shares[i, j] = (share, f" in {share:.0%} of {reading.resamples} resamples") if reading.resamples else (1.0, "")
    return ring_of(
        dict(enumerate(reading.variables)),
        reading.pag().edges(),
        f"{reading.method} with {reading.test}",
        note,
        shares,
        {},
    )


def graph_figure(reading: Discovery, pyplot: Any) -> Any:
    """The graph as a matplotlib figure."""
    return panels_figure([panel(reading)], kinds_of(reading.pag().edges()), reading.name, pyplot)


def svg(reading: Discovery) -> str:
    """The graph as SVG, for light and dark backgrounds."""
    label = f"Causal graph over the {len(reading.variables)} variables of {reading.name}"
    return drawing([panel(reading)], kinds_of(reading.pag().edges()), reading.name, label)
