"""What every study shows: its derived rows as tables, in the terminal and in the appendices of the site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.reading import Reading
from keyquery_studies.common.rows import Row

HIDDEN = ("digest", "device", "seconds", "name", "part_of", "text", "data", "note", "learn_s", "graph_s", "shared")
INTERVAL = {"change", "low", "high"}


def lines(reading: Reading) -> list[Any]:
    """The summary of a study as terminal tables."""
    return [line for table in tables(getattr(reading, "summary")()) for line in (*_terminal(*table), "")]  # noqa: B009


def tables(rows: Sequence[Row]) -> list[tuple[dict[str, str], list[dict[str, str]]]]:
    """Rows as text: a table per set of columns, each with what all of its rows share."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in map(flat, rows):
        groups.setdefault(tuple(row), []).append(row)
    split = []
    for columns, group in groups.items():
        shared = {key: group[0][key] for key in columns if len(group) > 1 and len({row[key] for row in group}) == 1}
        split.append((shared, [{key: value for key, value in row.items() if key not in shared} for row in group]))
    return split


def flat(row: Row) -> dict[str, str]:
    """The scalars of a row as text; a mean with its standard deviation, or a change with its interval, is one cell."""
    values: dict[str, str] = {}
    for key, value in row.items():
        spread = row.get(f"{key}_sd")
        limits = [row.get(name) for name in (f"{key}_low", f"{key}_high")] if key != "change" else [None]
        limits = [row.get("low"), row.get("high")] if key == "change" else limits
        if isinstance(value, Mapping) and value.keys() >= INTERVAL:
            values[key] = _within(value["change"], value["low"], value["high"])
        elif value is None or key in HIDDEN or isinstance(value, (list, tuple, Mapping)):
            continue  # not for a table
        elif key.endswith(("_sd", "_low", "_high")) or (key in ("low", "high") and "change" in row):
            continue  # stands beside its mean
        elif None not in limits:
            values[key] = _within(value, *limits)
        else:
            values[key] = cell(value) if spread is None else f"{cell(value)} ± {spread:.2g}"
    return values


def cell(value: Any) -> str:
    """A scalar with four significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _within(value: Any, low: Any, high: Any) -> str:
    return cell(value) if low is None else f"{cell(value)} [{cell(low)}, {cell(high)}]"


def _terminal(shared: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> list[Any]:
    table = Table(box=None, pad_edge=False, header_style="")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right" if _number(rows[0][name]) else "left")
    for row in rows:
        table.add_row(*row.values())
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shared.items())
    return [*([Text(f"In all rows: {facts}.")] if facts else []), table]


def _number(text: str) -> bool:
    return text[:1] in "+-−.0123456789"
