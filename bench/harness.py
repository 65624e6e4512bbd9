"""Shared by all benchmarks: CPU timing, results as Readings, and the table of docs/measured.md made from them."""

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
    """Put a table of all results between the page's two bench marks."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    lines = ["| measured | figure | lowest to highest | goal |", "|---|---|---|---|"]
    for result in results:
        for r in result["rows"]:
            if not r.get("shown", True):
                continue
            spread = f"{r['low']:.3g} to {r['high']:.3g}"
            lines.append(f"| {r['what']} | {r['value']:.3g} {r['unit']} | {spread} | {r['goal']} |")
    table = "\n".join(lines) + "\n"
    text = PAGE.read_text()
    assert text.count("<!-- bench -->\n") == 1, "the page has lost its bench marks"
    PAGE.write_text(re.sub(r"(?<=<!-- bench -->\n).*?(?=<!-- /bench -->)", table, text, flags=re.S))
