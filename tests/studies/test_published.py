"""Every result that docs/studies publishes can be opened, summarised and shown."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import keyquery as kq
from keyquery.report.kit import terminal

FILES = sorted(Path(__file__).parents[2].joinpath("docs", "studies").glob("*.json"))
PUBLISHED = [path for path in FILES if "kind" in json.loads(path.read_text(encoding="utf-8"))]
# How often intervals are drawn: their figures are compared with the page's by its examples.
FEWER = ("circuit.statistics.DRAWS", "lineage.summary.MATCHINGS", "vision_language.study.DRAWS")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_result_is_shown(path, monkeypatch):
    for name in FEWER:
        monkeypatch.setattr(f"keyquery_studies.{name}", 20)
    console = Console(width=100, file=io.StringIO())
    terminal.show(kq.Reading.load(path), console)
    assert len(console.file.getvalue().splitlines()) > 3
