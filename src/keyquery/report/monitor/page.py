"""A monitored training as a self-contained HTML page: heads by steps, the curves of one head, and alarms."""

from __future__ import annotations

from keyquery.instruments.monitor.reading import Monitored
from keyquery.pages.document import document
from keyquery.reading import short
from keyquery.report.monitor.figure import SPREAD

SCRIPTS = ("elements.js", "monitor.js")
DIGITS = 4


def monitor_page(reading: Monitored) -> str:
    """The page: a heat map of any metric over heads and steps, with alarms marked."""
    layers = len({head["layer"] for head in reading.heads})
    facts = f"{layers} layers · {len(reading.heads)} heads · {len(reading.steps)} records to step {reading.steps[-1]}"
    data = {
        "facts": facts,
        "steps": list(reading.steps),
        "heads": [head["name"] for head in reading.heads],
        "layers": [head["layer"] for head in reading.heads],
        "curves": {name: curve for name, curve in reading.curves.items() if name != "finite"},
        "units": dict(reading.units),
        "log": list(SPREAD),
        "alarms": [{key: alarm[key] for key in ("step", "rule", "heads", "reason")} for alarm in reading.alarms],
        "clips": len(reading.clips),
    }
    return document("monitor", str(reading.model["name"]), SCRIPTS, short(data, DIGITS), "monitor")
