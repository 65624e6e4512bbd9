"""The generated pages are those of the results on file, and no benchmark figure stands on two of them."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    yield lambda name: runpy.run_path(str(ROOT / "bench" / f"{name}.py"))
    sys.path.remove(str(ROOT / "bench"))


@pytest.mark.slow
def test_the_appendices_of_studies_are_those_of_their_results(bench):
    pages = {path: text for path, text in bench("appendix")["pages"]().items() if path.exists()}
    assert len(pages) > 10
    stale = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"python bench/appendix.py makes them anew: {stale}"


def test_every_figure_of_a_benchmark_stands_on_one_page(bench):
    harness = bench("harness")
    first, rest = (page.read_text(encoding="utf-8") for page in (harness["PAGE"], harness["REST"]))
    named = [{line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")} for page in (first, rest)]
    assert named[0] & named[1] == {"| measured"}
    assert {f"| {what}" for what in harness["HEADLINES"]} | {"| measured"} == named[0]
