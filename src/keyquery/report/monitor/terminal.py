"""A monitored training in the terminal: the latest record, the heads with the largest logits, and alarms."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.instruments.monitor.reading import Monitored
from keyquery.report.kit.tables import columns_table

MOST = 8  # heads and alarms shown
SHOWN = ("largest", "bound", "sigma", "relative_entropy", "sink", "query_gradient")


def monitor_lines(reading: Monitored) -> list[Any]:
    """The heads with the largest logits at the last step, and the latest alarms."""
    count = f"{len(reading.heads)} heads, {len(reading.steps)} records"
    title = f"{reading.model['name']}: step {reading.steps[-1]}, {count}"
    shown = [name for name in SHOWN if name in reading.curves]
    table = columns_table("head", *(name.replace("_", " ") for name in shown))
    table.columns[0].no_wrap = True
    logits = [float("inf") if curve[-1] is None else curve[-1] for curve in reading.curves["largest"]]
    order = sorted(range(len(logits)), key=lambda at: -logits[at])
    for at in order[:MOST]:
        cells = (reading.curves[name][at][-1] for name in shown)
        table.add_row(reading.heads[at]["name"], *("–" if cell is None else f"{cell:.4g}" for cell in cells))
    lines: list[Any] = [Text(title, style="bold"), table, ""]
    lines += [f"step {alarm['step']}: {alarm['reason']}" for alarm in reading.alarms[-MOST:]] or ["No alarms."]
    if len(reading.alarms) > MOST:
        lines.append(f"{len(reading.alarms) - MOST} earlier alarms are in the JSON.")
    if reading.clips:
        lines.append(f"QK-Clip scaled heads {len(reading.clips)} times, last at step {reading.clips[-1]['step']}.")
    return lines
