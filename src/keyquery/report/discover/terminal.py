"""A causal graph over columns in the terminal: its edges and how often they are in a resample."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.instruments.discover.discover import Discovery
from keyquery.report.causes.layout import MEANS, edge_text, kind_of

MOST = 40  # edges that are shown


def facts_of(reading: Discovery) -> list[str]:
    """How the graph was found, as short texts."""
    rows = [] if reading.rows is None else [f"{reading.rows:,} rows, level {reading.alpha:g}"]
    rows += [f"{reading.dropped:,} rows with missing values left out"] if reading.dropped else []
    facts = [f"{len(reading.variables)} variables", *rows, f"{reading.method} with {reading.test}"]
    facts += [f"{reading.tests:,} tests" + ("" if reading.done else ", stopped early")]
    facts += [f"{len(set(reading.tiers))} tiers"] if reading.tiers is not None else []
    facts += [f"{len(reading.forbidden)} forbidden"] if reading.forbidden else []
    facts += [f"{len(reading.required)} required"] if reading.required else []
    facts += ["selection bias allowed"] if reading.selection else []
    return facts + ([f"{reading.resamples} resamples"] if reading.resamples else [])


def discovery_lines(reading: Discovery) -> list[Any]:
    """Title, facts, edges, and what the kinds of edges mean."""
    lines: list[Any] = [Text(reading.name, style="bold"), Text(", ".join(facts_of(reading))), ""]
    table, shares = Table(box=None, pad_edge=False, header_style=""), reading.shares()
    for column in ("edge", "meaning", *(["resamples"] if reading.resamples else [])):
        table.add_column(column, justify="right" if column == "resamples" else "left", no_wrap=True)
    for i, j, at_i, at_j in reading.edges[:MOST]:
        text = edge_text(reading.variables[i], reading.variables[j], at_i, at_j)
        share = [f"{shares.get((i, j), 0.0):.0%}"] if reading.resamples else []
        table.add_row(Text(text), MEANS[kind_of(at_i, at_j)], *share)
    lines += [table if reading.edges else "No edges: all variables are independent of each other."]
    if (count := len(reading.edges)) > MOST:
        lines += [f"The first {MOST} of {count} edges; --json, --csv or --html for all."]
    return lines
