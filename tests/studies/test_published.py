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


def test_the_page_of_kernels_says_how_far_from_convergence_models_are():
    page = (FILES[0].parent / "kernels.md").read_text(encoding="utf-8")
    rows = kq.Reading.load(FILES[0].parent / "kernels.json").summary()
    longer = [row for row in rows if row["part"] == "longer"]
    end = [row for row in longer if (row["objective"], row["share"]) == ("next token", 0.02)]
    fell = {name: max(row["fell"] for row in longer if row["objective"] == name) for name in ("next token", "masked")}
    words = (
        f"at most {max(row['fell'] for row in end):.3f} nats (next token, 2 %), {fell['next token']:.3f} (next token)"
    )
    assert f"{words} and {fell['masked']:.3f}".replace("0.", ".") in " ".join(page.split())
    assert max(abs(row["gap"]) for row in end if row["gap"] is not None) < 0.0085
    worse = [row for row in longer if row["gap"] is not None and row["gap_p"] < 0.05]
    shrunk = [100 * (1 - row["gap"] / row["gap_half"]) for row in worse]
    assert f"shrink by {min(shrunk):.0f} to {max(shrunk):.0f} %" in " ".join(page.split())
    twice = [-row["longer_change"] for row in rows if row["part"] == "language" and row["share"] == 1]
    assert f"gain {min(twice):.2f} to {max(twice):.2f} by twice the steps".replace("0.", ".") in " ".join(page.split())
