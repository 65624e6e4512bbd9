"""Records of a monitor: measurements of all heads by step, alarms, and the file that they are written to."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.reading import METRICS, Monitored
from keyquery.reading import provenance
from keyquery.support.files import append_line, move_aside, read_text, write_text

RECENT = 4  # records that alarms look at, beside the first
WATCHED = ("largest", "smallest", "effective_rank", "unscaled", "finite")
EXTREMES = {"largest": max, "bound": max, "sigma": max, "sink": max, "smallest": min, "relative_entropy": min}
FILE = "monitor.jsonl"


class Recorder:
    """The records of one run, in memory and in its folder; `writes` in the first of the processes of one model."""

    def __init__(
        self, name: str, every: int, rules: Rules, folder: str | Path | None = None, writes: bool = True
    ) -> None:
        self.name, self.every, self.rules, self.writes = name, every, rules, writes
        self.heads: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []  # {step, values: {metric: [per head]}, alarms, loss, clips}
        self.path = None if folder is None else Path(folder) / FILE
        self._summarised = 0  # records whose summaries were taken
        self._holding: set[tuple[str, int]] = set()  # alarms that were raised, and have not ended
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                state = read_records(self.path)
                self.heads, self.records, self._summarised = state["heads"], state["records"], len(state["records"])
                self._holding = _pairs(self._alarms())

    def add(
        self, step: int, heads: list[dict[str, Any]], columns: dict[str, np.ndarray], dtype: str
    ) -> list[dict[str, Any]]:
        """Add the record of a step; returns the alarms that it raises."""
        if self.records and step <= self.records[-1]["step"]:
            self._restart()
        self.heads = self.heads or heads
        values = {name: _plain(column) for name, column in columns.items() if not np.isnan(column).all()}
        record: dict[str, Any] = {"step": step, "values": values, "alarms": []}
        if "loss" in columns:
            record["loss"] = values.pop("loss", [None])[0]
        self.records.append(record)
        holding = self._alarms(dtype)
        record["alarms"] = [alarm for alarm in map(self._raised, holding) if alarm is not None]
        self._holding = _pairs(holding)
        self._append(record)
        return record["alarms"] if self.writes else []

    def add_clips(self, clips: list[dict[str, Any]]) -> None:
        """Note what was clipped by the last record."""
        self.records[-1]["clips"] = clips
        if clips:
            self._append({"step": self.records[-1]["step"], "clips": clips})

    def summaries(self) -> list[dict[str, float]]:
        """The curves of loggers, by step: extremes over heads, of records since the last call."""
        first, self._summarised = min(self._summarised, len(self.records)), len(self.records)
        return [_summary(record) for record in self.records[first:]]

    def _alarms(self, dtype: str = "float32") -> list[dict[str, Any]]:
        """Alarms that hold at the last record, also those that were raised before."""
        if not self.records:
            return []
        none = [None] * len(self.heads)
        recent = [record["values"] for record in self.records[:1] + self.records[1:][-RECENT:]]
        history = {name: np.array([values.get(name, none) for values in recent], float) for name in WATCHED}
        losses = [record["loss"] for record in self.records if "loss" in record]
        return self.rules.check(history, dtype, losses if "loss" in self.records[-1] else [])

    def _raised(self, alarm: Mapping[str, Any]) -> dict[str, Any] | None:
        """An alarm as it is recorded, with the heads that it did not hold for before; None without one."""
        new = [head for head in alarm["heads"] if (alarm["rule"], head) not in self._holding]
        if not new and (alarm["heads"] or (alarm["rule"], -1) in self._holding):
            return None
        others = f" ({len(alarm['heads'])} heads in all)" if len(alarm["heads"]) > 1 else ""
        subject = "" if alarm["head"] is None else f"{self.heads[alarm['head']]['name']}{others}: "
        return {
            "step": self.records[-1]["step"],
            "rule": alarm["rule"],
            "heads": new,
            "head": alarm["head"],
            "value": alarm["value"] if math.isfinite(alarm["value"]) else None,
            "reason": f"{alarm['rule']}: {subject}{alarm['why']}",
        }

    def _restart(self) -> None:
        """Rename the file of an earlier run in the folder, and forget its records."""
        if self.path is not None and self.path.exists() and self.writes:
            aside = move_aside(self.path)
            warnings.warn(
                f"{self.path} has a run up to step {self.records[-1]['step']}, now renamed to {aside.name};"
                " to continue it, call monitor.resume(step)",
                RuntimeWarning,
                stacklevel=2,
            )
        self.records, self._holding, self._summarised = [], set(), 0

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None and self.writes:
            if not self.path.exists():
                append_line(self.path, json.dumps(self._head()))
            append_line(self.path, json.dumps(line, allow_nan=False))

    def drop(self, step: int) -> None:
        """Drop records from a step on."""
        kept = [record for record in self.records if record["step"] < step]
        if len(kept) == len(self.records):
            return
        self.records = kept
        self._holding = _pairs(self._alarms())
        if self.path is not None and self.writes:
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in (self._head(), *self.records)))

    def _head(self) -> dict[str, Any]:
        return {"model": self.name, "every": self.every, "heads": self.heads}

    def state(self) -> dict[str, Any]:
        """All records as plain data."""
        return {**self._head(), "records": self.records}


def read_records(path: Path) -> dict[str, Any]:
    """The state that a file of records holds; an incomplete last line, of a run that was killed, is left out."""
    lines, texts = [], read_text(path).splitlines()
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise ValueError(f"{path} is not a file of monitor records: line {number} is no JSON") from None
    if not lines or "heads" not in lines[0]:
        raise ValueError(f"{path} is not a file of monitor records")
    records: list[dict[str, Any]] = []
    for line in lines[1:]:
        if "values" in line:
            records.append(line)
        elif records and "clips" in line:
            records[-1].setdefault("clips", []).extend(line["clips"])
    return {**lines[0], "records": records}


def reading_of(state: Mapping[str, Any], facts: Mapping[str, Any]) -> Monitored:
    """The reading of a run's records."""
    records, none = state["records"], [None] * len(state["heads"])
    if not records:
        raise ValueError(
            "the monitor has recorded nothing: no training step ran under `with monitor`, or before monitor.step(),"
            " with the model in training mode and its own optimiser"
        )
    known = [metric for metric in METRICS if any(metric in record["values"] for record in records)]
    by_step = {metric: [record["values"].get(metric, none) for record in records] for metric in known}
    return Monitored(
        model={"name": state["model"]},
        steps=[record["step"] for record in records],
        heads=state["heads"],
        curves={metric: [list(curve) for curve in zip(*rows, strict=True)] for metric, rows in by_step.items()},
        alarms=[alarm for record in records for alarm in record["alarms"]],
        clips=[clip for record in records for clip in record.get("clips", [])],
        losses=[record.get("loss") for record in records] if any("loss" in record for record in records) else [],
        provenance=provenance(**facts),
    )


def _plain(column: np.ndarray) -> list[float | None]:
    """Numbers as JSON holds them: 7 digits, None where not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in column.tolist()]


def _pairs(alarms: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Rules and heads; −1 for what is of no head."""
    return {(alarm["rule"], head) for alarm in alarms for head in alarm["heads"] or [-1]}


def _summary(record: Mapping[str, Any]) -> dict[str, float]:
    """The curves of loggers: extremes over heads."""
    row = {"attention/alarms": float(len(record["alarms"]))}
    for metric, extreme in EXTREMES.items():
        known = [value for value in record["values"].get(metric, ()) if value is not None]
        if known:
            row[f"attention/{extreme.__name__} {metric}"] = float(extreme(known))
    return row
