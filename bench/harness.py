"""Shared by all benchmarks: CPU timing, results as Readings, and the tables of docs/measured*.md made from them."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keyquery.reading import Reading, provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "measured.md"
REST = HERE.parent / "docs" / "measured_all.md"
# What the first page shows, also goals that are missed; all other figures are in the appendix, and no figure in both.
HEADLINES = (
    "spectra of 144 heads: how many times less CPU time than dense float32 torch",
    "spectra of random weights of GPT-2 small's shape: how many times less CPU time than TransformerLens",
    "look at random weights of an 8B Llama's shape, 1,024 heads: over `import torch`",
    "look at random weights of an 8B Llama's shape, 1,024 heads: peak memory",
    "softmax attention over primal layer, n = 1,024, H200",
    "softmax attention over primal layer, n = 65,536, H200",
    "primal layer over its projections, n = 65,536, H200",
    "attention `symmetric` over `general`, 65,536 tokens, 1,024 a sequence, H200",
    "dialled attention over plain, 65,536 tokens, 4,096 a sequence, head width 64, H200",
    "how many times less CPU time than causal-learn: 60 graphs of 30 nodes, 768 samples",
    "graphs with equal skeletons, 768 samples",
    "survey: cost a head among 100,000 heads over that among 100",
)


@dataclass(frozen=True, kw_only=True)
class Bench(Reading, kind="bench"):
    """Figures of one benchmark: rows of what, value, low, high, unit and the goal it is held against."""

    name: str
    rows: list[dict[str, Any]]


def cpu_seconds(work: Callable[[], Any], repeats: int) -> list[float]:
    """CPU seconds of each of several calls, after one that warms up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return seconds


def seconds(step: Callable[[], Any], times: int, device: str) -> float:
    """Seconds of one step, the mean of several: on a GPU by its own clock, else of CPU time."""
    if device != "cuda":
        start = time.process_time()
        for _ in range(times):
            step()
        return (time.process_time() - start) / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def row(what: str, samples: list[float], unit: str, goal: str) -> dict[str, Any]:
    """One figure: the median of several measurements, with the lowest and the highest."""
    value, low, high = statistics.median(samples), min(samples), max(samples)
    print(f"{what}: {value:.3g} {unit} ({low:.3g} to {high:.3g}); goal {goal}", flush=True)
    return {"what": what, "value": value, "low": low, "high": high, "unit": unit, "goal": goal}


def publish(name: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write the results as JSON and make the table of all results anew."""
    RESULTS.mkdir(exist_ok=True)
    facts = {"threads": torch.get_num_threads(), "cpus": os.cpu_count(), **facts}
    Bench(name=name, rows=rows, provenance=provenance(**facts)).to_json(RESULTS / f"{name}.json")
    rewrite_page()


def rewrite_page() -> None:
    """Put the headlines into the table of the first page, and all other results into that of the appendix."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    rows = [row for result in results for row in result["rows"] if row.get("shown", True)]
    missing = set(HEADLINES) - {row["what"] for row in rows}
    assert not missing, f"headlines without a result: {missing}"
    _fill(PAGE, sorted((row for row in rows if row["what"] in HEADLINES), key=lambda row: HEADLINES.index(row["what"])))
    _fill(REST, [row for row in rows if row["what"] not in HEADLINES])


def _fill(page: Path, rows: list[dict[str, Any]]) -> None:
    lines = ["| measured | figure | lowest to highest | goal |", "|---|---|---|---|"]
    for r in rows:
        spread = f"{r['low']:.3g} to {r['high']:.3g}"
        lines.append(f"| {r['what']} | {r['value']:.3g} {r['unit']} | {spread} | {r['goal']} |")
    text = page.read_text()
    assert text.count("<!-- bench -->\n") == 1, f"{page.name} has lost its bench marks"
    table = "\n".join(lines) + "\n"
    page.write_text(re.sub(r"(?<=<!-- bench -->\n).*?(?=<!-- /bench -->)", lambda _: table, text, flags=re.S))
