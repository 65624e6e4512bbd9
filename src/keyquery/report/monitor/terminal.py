"""A monitored training in the terminal: the latest record, the heads with the largest logits, and alarms."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.instruments.monitor.reading import Monitored
from keyquery.pages.tables import columns_table

MOST = 8  # heads and alarms shown
SHOWN = {
    "largest": "largest logit",
    "bound": "bound",
    "sigma": "σ₁(M)",
    "relative_entropy": "entropy/uniform",
    "sink": "sink",
    "query_gradient": "‖∂Wq‖",
}


def monitor_lines(reading: Monitored) -> list[Any]:
    """The heads with the largest logits at the last step, and the latest alarms."""
    count = f"{len(reading.heads)} heads, {len(reading.steps)} records"
    title = f"{reading.model['name']}: step {reading.steps[-1]}, {count}"
    shown = [name for name in SHOWN if name in reading.curves]
    table = columns_table("head", *(SHOWN[name] for name in shown))
    for column in table.columns:
        column.no_wrap = True
    names = [head["name"] for head in reading.heads]
    start = _shared_start(names)
    logits = [float("inf") if curve[-1] is None else curve[-1] for curve in reading.curves["largest"]]
    order = sorted(range(len(logits)), key=lambda at: -logits[at])
    for at in order[:MOST]:
        cells = (reading.curves[name][at][-1] for name in shown)
        table.add_row(names[at][start:], *("–" if cell is None else f"{cell:.3g}" for cell in cells))
    within = f"Heads of {names[0][:start]}…" if start else ""
    lines: list[Any] = [Text(title, style="bold"), *([within] if within else []), table, ""]
    lines += [f"step {alarm['step']}: {alarm['reason']}" for alarm in reading.alarms[-MOST:]] or ["No alarms."]
    if len(reading.alarms) > MOST:
        lines.append(f"{len(reading.alarms) - MOST} earlier alarms are in the JSON.")
    if reading.clips:
        lines.append(f"QK-Clip scaled heads {len(reading.clips)} times, last at step {reading.clips[-1]['step']}.")
    return lines


def _shared_start(names: list[str]) -> int:
    """How many characters of dotted names are the same in all, up to a dot."""
    levels = [set(level) for level in zip(*(name.split(".") for name in names), strict=False)]
    shared = 0
    for level in levels[:-1]:
        if len(level) > 1:
            break
        shared += len(level.pop()) + 1
    return shared
