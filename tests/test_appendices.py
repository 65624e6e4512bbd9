"""Generated pages: the appendices of studies, and no benchmark figure stands on two pages."""

import runpy
import sys
from pathlib import Path

import pytest

import keyquery as kq

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    yield lambda name: runpy.run_path(str(ROOT / "bench" / f"{name}.py"))
    sys.path.remove(str(ROOT / "bench"))


def test_an_appendix_has_all_that_its_study_derives_and_every_row():
    made = runpy.run_path(str(ROOT / "docs" / "site" / "appendices.py"))
    assert {"archived", "mask"}.isdisjoint(made["names"]())
    page = made["appendix"]("depth", kq.Reading.load(ROOT / "docs" / "studies" / "depth.json"))
    assert [line for line in page.splitlines() if line.startswith("##")] == [
        "## By `summary()`",
        "## By `trends()`",
        "## All 96 rows",
    ]
    tables = page.split("## ")[1:]
    assert [table.count("\n| ") - 1 for table in tables] == [24, 3, 96]
    assert "| 330000 | 1 | 166 | 333328 | 3.569 ± 0.014 |" in page
    assert "| 330000 | 0.03184 [-0.01738, 0.08105] |" in tables[1]


def test_every_figure_of_a_benchmark_stands_on_one_page(bench):
    harness = bench("harness")
    first, rest = (page.read_text(encoding="utf-8") for page in (harness["PAGE"], harness["REST"]))
    named = [{line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")} for page in (first, rest)]
    assert named[0] & named[1] == {"| measured"}
    assert {f"| {what}" for what in harness["HEADLINES"]} | {"| measured"} == named[0]
