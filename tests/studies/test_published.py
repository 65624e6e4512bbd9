"""Every result that docs/studies publishes can be opened, summarised and shown."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import keyquery as kq
from keyquery.pages import terminal

FILES = sorted(Path(__file__).parents[2].joinpath("docs", "studies").glob("*.json"))
PUBLISHED = [path for path in FILES if "kind" in json.loads(path.read_text(encoding="utf-8"))]
# How often intervals are drawn: their figures are compared with the page's by its examples.
FEWER = ("circuit.statistics.DRAWS", "lineage.summary.MATCHINGS", "archive.DRAWS")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_result_is_shown(path, monkeypatch):
    for name in FEWER:
        monkeypatch.setattr(f"keyquery_studies.{name}", 20)
    console = Console(width=100, file=io.StringIO())
    terminal.show(kq.Reading.load(path), console)
    assert len(console.file.getvalue().splitlines()) > 3


def test_the_page_of_kernels_says_what_its_rows_do():
    page = " ".join((FILES[0].parent / "kernels.md").read_text(encoding="utf-8").split())
    rows = kq.Reading.load(FILES[0].parent / "kernels.json").summary()
    longer = [row for row in rows if row["part"] == "longer"]
    end = [row for row in longer if (row["objective"], row["share"]) == ("next token", 0.02)]
    fell = {name: max(row["fell"] for row in longer if row["objective"] == name) for name in ("next token", "masked")}
    words = (
        f"at most {max(row['fell'] for row in end):.3f} nats (next token, 2 %), {fell['next token']:.3f} (next token)"
    )
    assert f"{words} and {fell['masked']:.3f}".replace("0.", ".") in page
    gaps = [row for row in end if row["gap"] is not None]
    assert max(abs(row["gap"]) for row in gaps) < 0.0085
    assert max(abs(row[limit]) for row in gaps for limit in ("gap_low", "gap_high")) < 0.018
    compared = [row for row in rows if row["part"] in ("language", "longer") and row["gap"] is not None]
    structured = [row for row in compared if row["arm"] != "symmetric init"]
    worse = [row for row in structured if row["gap_p"] < 0.05]
    assert len(structured) == 32
    assert len(worse) == 11
    assert min(row["gap"] for row in worse) > 0
    turned = [row for row in structured if row["objective"] == "masked" and row["rope"]]
    assert [min(row["gap"] for row in turned) > 0, sum(row in worse for row in turned)] == [True, 7]
    below = sorted(row["gap"] for row in structured if row["gap_high"] < 0)
    assert below == pytest.approx([-0.040, -0.019], abs=5e-4)
    shrunk = [100 * (1 - row["gap"] / row["gap_half"]) for row in worse if row["part"] == "longer"]
    assert f"five differences with a half shrink by {min(shrunk):.0f} to {max(shrunk):.0f} %" in page
    twice = [-row["longer_change"] for row in rows if row["part"] == "language" and row["share"] == 1]
    assert f"gain {min(twice):.2f} to {max(twice):.2f} by twice the steps".replace("0.", ".") in page
    control = [row for row in compared if row["arm"] == "symmetric init"]
    little = [row["gap"] for row in control if row["rope"] or row["objective"] == "next token"]
    assert [round(min(little), 3), round(max(little), 3)] == [-0.016, 0.010]
    ahead = [-row["gap"] for row in control if row["gap"] not in little]
    assert [round(min(ahead), 3), round(max(ahead), 2)] == [0.035, 0.48]
    edges = [row for row in longer if row["edge"] and row not in end]
    assert {(row["objective"], row["share"], row["arm"]) for row in edges} == {
        ("next token", 1.0, "symmetric init"),
        ("next token", 1.0, "split"),
    }
