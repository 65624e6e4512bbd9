"""The appendix of every study: all its rows as tables, made anew from docs/studies/*.json.

python bench/appendix.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import keyquery as kq

STUDIES = Path(__file__).parents[1] / "docs" / "studies"
HIDDEN = ("digest", "device", "seconds", "name", "part_of", "text", "data", "note", "learn_s", "graph_s", "shared")
DERIVED = (
    "summary",
    "followed",
    "starts",
    "turned",
    "correlations",
    "decays",
    "trends",
    "beside",
    "contrasts",
    "protocols",
)
MOST = 3000  # rows; of longer studies the appendix holds the summary


def appendix(name: str, reading: kq.Reading) -> str:
    """The page: what the study derives from its rows, then the rows; one table per set of columns."""
    rows = reading.records()
    lines = [f"# Appendix: {name.replace('_', ' ')}", ""]
    lines += [
        f"Tables of [the study](../{name}.md), made by `python bench/appendix.py` from `docs/studies/{name}.json`.",
        "",
    ]
    for method in DERIVED:
        if callable(derive := getattr(reading, method, None)) and (derived := derive()):
            lines += [f"## By `{method}()`", "", *_tables(derived)]
    if len(rows) <= MOST:
        return "\n".join([*lines, f"## All {len(rows):,} rows", "", *_tables(rows)]).rstrip() + "\n"
    return (
        "\n".join([*lines, f'All {len(rows):,} rows: `kq.Reading.load("docs/studies/{name}.json").records()`.']) + "\n"
    )


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in map(_flat, rows):
        groups.setdefault(tuple(row), []).append(row)
    return [line for group in groups.values() for line in (*_table(group), "")]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without empty, hidden and nested values; intervals become three columns' worth in one."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if hasattr(value, "_asdict"):
            value = value._asdict()
        if isinstance(value, Mapping) and {"change", "low", "high"} <= value.keys():
            value = " ".join((_cell(value["change"]), f"[{_cell(value['low'])}, {_cell(value['high'])}]"))
        if value is not None and key not in HIDDEN and not isinstance(value, (list, tuple, Mapping)):
            flat[key] = value
    return flat


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all rows share in a line, the rest as columns."""
    same = [key for key in rows[0] if len(rows) > 1 and len({row[key] for row in rows}) == 1]
    columns = [key for key in rows[0] if key not in same]
    lines = ["In all rows: " + ", ".join(f"{key} {_cell(rows[0][key])}" for key in same) + ".", ""] if same else []
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row[key]) for key in columns) + " |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def pages() -> dict[Path, str]:
    """The contents of every appendix."""
    return {
        STUDIES / "appendix" / f"{path.stem}.md": appendix(path.stem, kq.Reading.load(path))
        for path in sorted(STUDIES.glob("*.json"))
        if "kind" in json.loads(path.read_text(encoding="utf-8")) and (STUDIES / f"{path.stem}.md").exists()
    }


if __name__ == "__main__":
    (STUDIES / "appendix").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
