"""The appendix of every study: all its rows as tables, made of docs/studies/*.json when the site is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyquery_studies.common.rows import Row
from keyquery_studies.common.show import tables

import keyquery as kq

STUDIES = Path(__file__).parents[1] / "studies"
# What a study derives from its rows, beside the summary.
DERIVED = ("followed", "starts", "turned", "correlations", "decays", "trends", "beside", "contrasts", "protocols")
LONGEST = 3000  # rows; of longer studies the appendix holds what is derived from them


def on_files(files: Any, config: Any) -> Any:
    """Adds studies/appendix/NAME.md for every study that has a page."""
    from mkdocs.structure.files import File

    for name in names():
        reading = kq.Reading.load(STUDIES / f"{name}.json")
        files.append(File.generated(config, f"studies/appendix/{name}.md", content=appendix(name, reading)))
    return files


def names() -> list[str]:
    """Studies with a page and a reading."""
    readings = [path for path in STUDIES.glob("*.json") if "kind" in json.loads(path.read_text(encoding="utf-8"))]
    return sorted(path.stem for path in readings if path.with_suffix(".md").exists())


def appendix(name: str, reading: kq.Reading) -> str:
    """The page: what the study derives from its rows, then the rows."""
    rows, path = reading.records(), f"docs/studies/{name}.json"
    lines = [f"# Appendix: {name.replace('_', ' ')}", "", f"Tables of [the study](../{name}.md), made of `{path}`.", ""]
    for method in ("summary", *DERIVED):
        derive = getattr(reading, method, None)
        if callable(derive) and (derived := derive()):
            lines += [f"## By `{method}()`", "", *markdown(derived)]
    if len(rows) <= LONGEST:
        lines += [f"## All {len(rows):,} rows", "", *markdown(rows)]
    else:
        lines += [f'All {len(rows):,} rows: `kq.Reading.load("{path}").records()`.']
    return "\n".join(lines).rstrip() + "\n"


def markdown(rows: list[Row]) -> Iterator[str]:
    """One table per set of columns, with what all of its rows share in a line."""
    for shared, table in tables(rows):
        if shared:
            yield from ("In all rows: " + ", ".join(f"{key} {value}" for key, value in shared.items()) + ".", "")
        yield "| " + " | ".join(table[0]) + " |"
        yield "|" + "---|" * len(table[0])
        yield from ("| " + " | ".join(row.values()).replace("\n", " ") + " |" for row in table)
        yield ""
