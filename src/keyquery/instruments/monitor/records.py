"""Records of a monitor: measurements of all heads by step, alarms, and the file that they are written to."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, get_backend, get_rank

from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.clip import clip_heads, score_factor
from keyquery.instruments.monitor.observation import Seen
from keyquery.instruments.monitor.packing import Packed, largest_norms, merge_forwards, plain
from keyquery.instruments.monitor.reading import METRICS, Monitored
from keyquery.instruments.monitor.structure import Ranks
from keyquery.instruments.monitor.weights import Layers
from keyquery.reading import provenance
from keyquery.support.files import append_line, move_aside, read_text, write_text
from keyquery.training.tensorboard import Board

RECENT = 64  # records that alarms look at, beside the first
WATCHED = ("largest", "smallest", "relative_entropy", "effective_rank", "entry", "unscaled", "finite")
FILE = "monitor.jsonl"


class Recorder:
    """The records of one run; an open record is filled by the forward and the gradients of its step."""

    def __init__(
        self,
        name: str,
        every: int,
        rules: Rules,
        on_alarm: Callable[[dict[str, Any]], Any],
        folder: str | Path | None = None,
        board: str | Path | None = None,
    ) -> None:
        self.name, self.every, self.rules, self.on_alarm = name, every, rules, on_alarm
        self.heads: list[dict[str, Any]] = []
        self.shared = False  # whether processes share one model
        self.count = 0  # of records, also of those still on their way
        self.path = None if folder is None else Path(folder) / FILE
        self.board, self._curves = None if board is None else Board(board, name), board
        self.dtype = "float32"
        self._scales: dict[str, float] = {}  # of the scores, by module
        self._dtypes: dict[str, torch.dtype] = {}  # of queries and keys, by module
        self._records: list[dict[str, Any]] = []  # {step, values: {metric: [per head]}, alarms, clips}
        self._columns: list[dict[str, np.ndarray]] = []  # the same values, for alarms
        self._past: dict[str, np.ndarray] | None = None  # `_history` at the last record
        self._open: dict[str, list[dict[str, Tensor]]] = {}  # by module: measurements of every forward
        self._ranks: Ranks | None = None  # of the open record
        self._coming: tuple[int, Packed, Ranks | None] | None = None
        self._active: set[tuple[str, int]] = set()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.load(read_records(self.path))

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records, also the one whose numbers are still on their way from the device."""
        self.settle()
        for record, columns in zip(self._records, self._columns, strict=True):
            self._fill(record, columns)
        return self._records

    @staticmethod
    def _fill(record: dict[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        """Values as JSON holds them, which are made when a record is read or written, not while the model trains."""
        if record["values"] is None:
            record["values"] = {name: plain(column) for name, column in columns.items() if not np.isnan(column).all()}

    def add(self, seen: Mapping[str, Seen], layers: Layers | None, whole: bool) -> None:
        """Add what one forward shows; `whole`: with ranks and shares."""
        seen = {name: each for name, each in seen.items() if each.statistics}
        norms = largest_norms({name: each.norms for name, each in seen.items() if each.norms})
        measured: dict[str, dict[str, Tensor]] = {}
        scales = {} if layers is None else layers.scales()
        for name, each in seen.items():
            statistics = torch.cat(each.statistics) if len(each.statistics) > 1 else each.statistics[0]
            measured[name] = {"statistics": statistics}
            if name in norms:
                measured[name]["input_norm"] = norms[name].expand(statistics.shape[-1])
            scale = scales.get(name, 1.0) if each.scale is None else each.scale
            self._scales[name], self._dtypes[name] = scale, each.dtype
            self.dtype = str(each.dtype).removeprefix("torch.")
            # Before weights are read, which fails where they are NaN.
            self._open.setdefault(name, []).append(measured[name])
        if layers is not None:
            for name, values in layers.measure(seen, norms, whole).items():
                measured[name].update(values)
            self._ranks, layers.ranks = layers.ranks or self._ranks, None

    def add_gradients(self, norms: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Gradient norms of queries and keys, by module, into the open record."""
        for name, (query, key) in norms.items():
            if name in self._open and len(query) == self._open[name][0]["statistics"].shape[-1]:
                self._open[name][0] |= {"query_gradient": query, "key_gradient": key}

    def finish(self, step: int) -> None:
        """Close the record of a step. Its numbers are read a step later, so that the device need not be waited for."""
        self.settle()
        if self._records and step <= self._records[-1]["step"]:
            self._restart()
        opened, self._open, ranks, self._ranks = self._open, {}, self._ranks, None
        whole = bool(opened)
        if self.shared:
            whole = _everywhere(whole)
        if whole:
            self._coming = step, Packed(merge_forwards(opened), self._scales, self._dtypes, self.shared), ranks
            self.count += 1

    def settle(self, wait: bool = True) -> None:
        """Read the numbers of the last record, raise alarms, and write it; later, if it is not to be waited for."""
        if self._coming is None:
            return
        step, packed, ranks = self._coming
        if ranks is not None and not (wait or ranks.done):
            return
        self._coming = None
        if not self.heads:
            self.heads = [
                {"layer": layer, "head": head, "name": f"{name}.{head}".lstrip(".")}
                for layer, (name, count) in enumerate(packed.heads)
                for head in range(count)
            ]
        columns = packed.columns()
        if ranks is not None:
            by_module = ranks.result()
            parts = [by_module.get(name, np.full(count, np.nan)) for name, count in packed.heads]
            columns["effective_rank"] = np.concatenate(parts)
        self._columns.append(columns)
        record: dict[str, Any] = {"step": step, "values": None, "alarms": []}
        self._records.append(record)
        record["alarms"] = self._alarms(step)
        if self.path is not None or self.board is not None:
            self._fill(record, columns)
            self.write(record)
        for alarm in record["alarms"] if self._first_process() else ():  # last: it is the user's, and may raise
            self.on_alarm(alarm)

    def _raised(self) -> list[dict[str, Any]]:
        """Alarms that hold at the last record, also those that were raised before."""
        if not self._records:
            return []
        layers = [head["layer"] for head in self.heads]
        self._past = self._history()
        return self.rules.check(self._past, [record["step"] for record in self._recent()], layers, self.dtype)

    def _alarms(self, step: int) -> list[dict[str, Any]]:
        raised, fresh = self._raised(), []
        for alarm in raised:
            if new := [head for head in alarm["heads"] if (alarm["rule"], head) not in self._active]:
                others = f" ({len(alarm['heads'])} heads in all)" if len(alarm["heads"]) > 1 else ""
                reason = f"{alarm['rule']}: {self.heads[alarm['head']]['name']}{others}: {alarm['why']}"
                value = alarm["value"] if math.isfinite(alarm["value"]) else None
                facts = {"step": step, "rule": alarm["rule"], "heads": new, "head": alarm["head"]}
                fresh.append({**facts, "value": value, "reason": reason})
        self._active = _pairs(raised)
        return fresh

    def _restart(self) -> None:
        """Rename the file of an earlier run in the folder, and forget its records."""
        if self.path is not None and self.path.exists() and self._first_process():
            aside = move_aside(self.path)
            warnings.warn(
                f"{self.path} has a run up to step {self._records[-1]['step']}, now renamed to {aside.name};"
                " to continue it, call monitor.resume(step)",
                RuntimeWarning,
                stacklevel=2,
            )
        self._records, self._columns, self._past, self._active, self.count = [], [], None, set(), 0

    def _recent(self) -> list[dict[str, Any]]:
        return self._records[:1] + self._records[1:][-RECENT:]

    def _history(self) -> dict[str, np.ndarray]:
        """The first and the latest records by metric, (records, heads); NaN where not measured."""
        none = np.full(len(self.heads), np.nan)
        recent = self._columns[:1] + self._columns[1:][-RECENT:]
        if self._past is None:
            return {metric: np.stack([columns.get(metric, none) for columns in recent]) for metric in WATCHED}
        last = self._columns[-1]  # one row more than before: stacking all again takes as long as a record
        return {
            metric: np.concatenate((past[:1], past[1:][1 - RECENT :], last.get(metric, none)[None]))
            for metric, past in self._past.items()
        }

    def latest(self, metric: str) -> np.ndarray:
        """A metric of every head at the last record."""
        self.settle()
        return self._columns[-1][metric]

    def _first_process(self) -> bool:
        return not self.shared or get_rank() == 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to the file and to TensorBoard."""
        if not self._first_process():
            return
        if self.path is not None:
            if not self.path.exists():
                append_line(self.path, json.dumps(self._head()))
            append_line(self.path, json.dumps(record, allow_nan=False))
        if self.board is not None and "values" in record:
            self.board.tell(_summary(record))

    def clip(self, model: nn.Module, layers: Layers, tau: float) -> list[dict[str, Any]]:
        """Clip the heads whose largest logit in the latest record exceeds tau, once per record."""
        if not self.records or "clips" in self.records[-1]:
            return []
        record = self.records[-1]
        values = record["values"].get("largest", [None] * len(self.heads))  # left out where all are NaN
        high = [
            (head["name"].rpartition(".")[0], head, largest)
            for head, largest in zip(self.heads, values, strict=True)
            if largest is not None and largest > tau
        ]
        now = layers.now({module for module, _, _ in high})  # others are not read, which fails where weights are NaN
        clips: list[dict[str, Any]] = []
        gammas: dict[int, dict[int, float]] = {}
        for module, head, largest in high:
            gamma = score_factor(layers.heads, now[module], head["head"], largest, tau)
            if gamma is None:
                message = f"{head['name']} is not clipped: its relative position bias alone exceeds {tau:g}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                continue
            gammas.setdefault(layers.index[module], {})[head["head"]] = gamma
            clips.append({"step": record["step"], "name": head["name"], "largest": largest, "factor": gamma})
        clip_heads(model, layers.heads, gammas)
        record["clips"] = clips
        if clips:
            self.write({"step": record["step"], "clips": clips})
        return clips

    def drop(self, step: int) -> None:
        """Drop records from a step on, also of TensorBoard."""
        if self.board is not None and self._curves is not None and step > 1:
            self.board.close()
            self.board = Board(self._curves, self.name, step - 1)
        kept = [record for record in self.records if record["step"] < step]
        if len(kept) == self.count:
            return
        self._records, self._columns, self.count = kept, self._columns[: len(kept)], len(kept)
        self._past = None
        self._active = _pairs(self._raised())
        self.rewrite()

    def rewrite(self) -> None:
        """Make the file hold all records, and no others."""
        if self.path is None or not self._first_process():
            return
        if self._records:
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in (self._head(), *self.records)))
        else:
            self.path.unlink(missing_ok=True)

    def _head(self) -> dict[str, Any]:
        return {"model": self.name, "every": self.every, "heads": self.heads}

    def state(self) -> dict[str, Any]:
        """All records as plain data."""
        records = self.records
        return {**self._head(), "records": records}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace all records."""
        self._coming, self._open, self._past = None, {}, None
        self.heads, self._records = list(state["heads"]), [dict(record) for record in state["records"]]
        self.count = len(self._records)
        self._columns = [
            {metric: np.array(column, dtype=float) for metric, column in record["values"].items()}
            for record in self._records
        ]
        self._columns = [
            {**columns, "finite": columns.get("finite", np.ones(len(self.heads)))} for columns in self._columns
        ]
        self._active = _pairs(self._raised())

    def reading(self, facts: Mapping[str, Any]) -> Monitored:
        """All records as a Reading."""
        return reading_of(self.state(), facts)

    def close(self) -> None:
        """Read the last record, and close TensorBoard's file."""
        self.settle()
        if self.board is not None:
            self.board.close()


def read_records(path: Path) -> dict[str, Any]:
    """The state that a file of records holds; an incomplete last line, of a run that was killed, is left out."""
    lines = []
    for number, text in enumerate(read_text(path).splitlines()):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number + 1 < len(read_text(path).splitlines()):
                raise ValueError(f"{path} is not a file of monitor records: line {number + 1} is no JSON") from None
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
    records = state["records"]
    if not records:
        raise ValueError(
            "the monitor has recorded nothing: no training step ran under `with monitor`, or before monitor.step(),"
            " with the model in training mode and its own optimiser"
        )
    curves = {
        metric: [
            [record["values"].get(metric, [None] * len(state["heads"]))[at] for record in records]
            for at in range(len(state["heads"]))
        ]
        for metric in METRICS
        if any(metric in record["values"] for record in records)
    }
    return Monitored(
        model={"name": state["model"]},
        steps=[record["step"] for record in records],
        heads=state["heads"],
        curves=curves,
        alarms=[alarm for record in records for alarm in record["alarms"]],
        clips=[clip for record in records for clip in record.get("clips", [])],
        provenance=provenance(**facts),
    )


def _pairs(alarms: list[dict[str, Any]]) -> set[tuple[str, int]]:
    return {(alarm["rule"], head) for alarm in alarms for head in alarm["heads"]}


def _everywhere(whole: bool) -> bool:
    """Whether every process has a record: one that failed must not leave the others waiting."""
    flag = torch.tensor(float(whole), device="cuda" if get_backend() == "nccl" else "cpu")
    all_reduce(flag, ReduceOp.MIN)
    return bool(flag)


def _summary(record: Mapping[str, Any]) -> dict[str, float]:
    """The curves of TensorBoard: extremes and means over heads."""
    row: dict[str, float] = {"step": float(record["step"]), "attention/alarms": float(len(record["alarms"]))}
    for metric, reduce in (
        ("largest", max),
        ("bound", max),
        ("sigma", max),
        ("smallest", min),
        ("relative_entropy", min),
        ("sink", max),
    ):
        if numbers := [value for value in record["values"].get(metric, ()) if value is not None]:
            row[f"attention/{reduce.__name__} {metric}"] = reduce(numbers)
    return row
