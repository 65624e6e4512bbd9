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


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_result_is_shown(path):
    console = Console(width=100, file=io.StringIO())
    terminal.show(kq.Reading.load(path), console)
    assert len(console.file.getvalue().splitlines()) > 3
