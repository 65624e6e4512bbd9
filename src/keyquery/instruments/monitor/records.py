"""Records of a monitor: measurements of all heads by step, alarms, and the file that they are written to."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, get_backend, get_rank

from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.bound import logit_bounds
from keyquery.instruments.monitor.clip import clip_heads, score_factor
from keyquery.instruments.monitor.layers import Layers, together
from keyquery.instruments.monitor.observation import Seen
from keyquery.instruments.monitor.reading import METRICS, Monitored
from keyquery.instruments.monitor.statistics import STATISTICS, merge_statistics
from keyquery.instruments.monitor.structure import Shares, effective_ranks
from keyquery.instruments.monitor.table import Table, plain
from keyquery.reading import provenance
from keyquery.support.files import append_line, move_aside, read_text, write_text
from keyquery.support.tensorboard import Board

RECENT = 64  # records that alarms look at, beside the first
WATCHED = ("largest", "smallest", "relative_entropy", "effective_rank", "entry", "unscaled", "finite")
FILE = "monitor.jsonl"


class OpenRecord:
    """What the forwards of one step have shown so far, by module."""

    def __init__(self) -> None:
        self.statistics: dict[str, list[Tensor]] = {}  # (tiles, rows, heads) per call
        self.values: dict[str, dict[str, Tensor]] = {}  # by metric, (heads,)
        self.norms: dict[str, Tensor] = {}  # largest ‖x‖ of inputs
        self.facts: dict[str, tuple[float, torch.dtype]] = {}  # scale of the scores, dtype of queries and keys
        self.shares: Shares | None = None

    def add(self, seen: Mapping[str, Seen], layers: Layers | None, whole: bool) -> None:
        """Add what one forward shows; `whole`: with ranks and shares. Weights come last: where NaN, reading fails."""
        inputs = {(name, at): (x,) for name, of in seen.items() for at, x in enumerate(of.norms)}
        for (name, _), norm in together(lambda x: x.flatten(1).amax(1), inputs).items():
            self.norms[name] = (
                torch.maximum(self.norms[name], norm.to(self.norms[name])) if name in self.norms else norm
            )
        for name, of_module in seen.items():
            known = layers is not None and name in layers.kept
            scale = layers.kept[name][0].scale if layers is not None and known else 1.0
            self.facts[name] = scale if of_module.scale is None else of_module.scale, of_module.dtype
            self.statistics.setdefault(name, []).extend(of_module.statistics)
            values = self.values.setdefault(name, {})
            if name in self.norms:
                values["input_norm"] = self.norms[name].expand(of_module.statistics[0].shape[-1])
        if layers is not None:
            self._add_weights(seen, layers, whole)

    def _add_weights(self, seen: Mapping[str, Seen], layers: Layers, whole: bool) -> None:
        counts = {name: of_module.statistics[0].shape[-1] for name, of_module in seen.items()}
        now = {name: read for name, read in layers.now(seen).items() if read[0].heads == counts[name]}
        norms = {name: self.norms.get(name, math.nan) for name in now}
        for name, (sigma, bound) in logit_bounds(now, norms, layers.heads).items():
            self.values[name] |= {"sigma": sigma, "bound": bound}
        if whole:
            if self.shares is None:
                for name, ranks in effective_ranks(now).items():
                    self.values[name]["effective_rank"] = ranks
            self.shares = self.shares or Shares()
            samples = {name: seen[name].sample for name in now}
            self.shares.add(layers.heads, now, {name: x for name, x in samples.items() if x is not None})

    def measured(self) -> dict[str, dict[str, Tensor]]:
        """Metrics by module, each of all heads."""
        shares = {} if self.shares is None else self.shares.result()
        tiles = {name: (torch.cat(parts) if len(parts) > 1 else parts[0],) for name, parts in self.statistics.items()}
        merged = together(merge_statistics, tiles)
        return {
            name: {**dict(zip(STATISTICS, rows, strict=True)), **self.values[name], **shares.get(name, {})}
            for name, rows in merged.items()
        }


class Recorder:
    """The records of one run; an open record is filled by the forwards and the gradients of its step."""

    def __init__(
        self, name: str, every: int, rules: Rules, folder: str | Path | None = None, board: str | Path | None = None
    ) -> None:
        self.name, self.every, self.rules = name, every, rules
        self.heads: list[dict[str, Any]] = []
        self.shared = False  # whether processes share one model
        self.count = 0  # of records, also of those still on their way
        self.path = None if folder is None else Path(folder) / FILE
        self.board, self._curves = None if board is None else Board(board, name), board
        self.raised: list[dict[str, Any]] = []  # alarms that nobody was told of yet
        self._told = 0  # records whose summaries were taken
        self._dtype = "float32"
        self._records: list[dict[str, Any]] = []  # {step, values: {metric: [per head]}, alarms, loss, clips}
        self._columns: list[dict[str, np.ndarray]] = []  # the same values, for alarms
        self._open = OpenRecord()
        self._losses: tuple[Tensor | float, int] = (0.0, 0)  # sum and number since the last record
        self._coming: tuple[int, Table] | None = None
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
            _fill(record, columns)
        return self._records

    def add(self, seen: Mapping[str, Seen], layers: Layers | None, whole: bool) -> None:
        """Add what one forward shows; `whole`: with ranks and shares."""
        self._open.add({name: of_module for name, of_module in seen.items() if of_module.statistics}, layers, whole)

    def add_gradients(self, norms: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Gradient norms of queries and keys, by module, into the open record."""
        for name, (query, key) in norms.items():
            if name in self._open.values and len(query) == self._open.statistics[name][0].shape[-1]:
                self._open.values[name] |= {"query_gradient": query, "key_gradient": key}

    def add_loss(self, loss: Tensor | float) -> None:
        """The loss of a step; its mean since the last record becomes part of the next. The device is not waited for."""
        value = torch.as_tensor(loss).detach().double().mean()
        self._losses = self._losses[0] + value, self._losses[1] + 1

    def finish(self, step: int) -> None:
        """Close the record of a step. Its numbers are read a step later, so that the device need not be waited for."""
        self.settle()
        if self._records and step <= self._records[-1]["step"]:
            self._restart()
        opened, self._open = self._open, OpenRecord()
        complete = bool(opened.statistics)
        if not (_everywhere(complete) if self.shared else complete):
            return
        total, number = self._losses
        loss = total / number if isinstance(total, Tensor) else None
        self._coming = step, Table(opened.measured(), opened.facts, loss, self.shared)
        self._dtype = str(next(reversed(opened.facts.values()))[1]).removeprefix("torch.")
        self._losses = 0.0, 0
        self.count += 1

    def settle(self) -> None:
        """Read the numbers of the last record, check for alarms, and write it."""
        if self._coming is None:
            return
        (step, table), self._coming = self._coming, None
        if not self.heads:
            self.heads = [
                {"layer": layer, "head": head, "name": f"{name}.{head}".lstrip(".")}
                for layer, (name, count) in enumerate(table.heads)
                for head in range(count)
            ]
        columns = table.columns()
        record: dict[str, Any] = {"step": step, "values": None, "alarms": []}
        if (loss := columns.pop("loss", None)) is not None:
            record["loss"] = plain(loss[:1])[0]
        self._columns.append(columns)
        self._records.append(record)
        record["alarms"] = self._fresh(step)
        self.raised += record["alarms"] if self._first_process() else []
        self.write(record)

    def summaries(self) -> list[dict[str, float]]:
        """The curves of loggers, by step: extremes over heads, of records since the last call."""
        self.settle()
        first, self._told = min(self._told, len(self._records)), len(self._records)
        return [_summary(*both) for both in zip(self._records[first:], self._columns[first:], strict=True)]

    def _holding(self) -> list[dict[str, Any]]:
        """Alarms that hold at the last record, also those that were raised before."""
        if not self._records:
            return []
        none = np.full(len(self.heads), np.nan)
        recent = self._columns[:1] + self._columns[1:][-RECENT:]
        history = {metric: np.stack([columns.get(metric, none) for columns in recent]) for metric in WATCHED}
        steps = [record["step"] for record in self._records[:1] + self._records[1:][-RECENT:]]
        losses = [record["loss"] for record in self._records if "loss" in record]
        losses = losses if "loss" in self._records[-1] else []
        return self.rules.check(history, steps, [head["layer"] for head in self.heads], self._dtype, losses)

    def _fresh(self, step: int) -> list[dict[str, Any]]:
        holding, fresh = self._holding(), []
        for alarm in holding:
            new = [head for head in alarm["heads"] if (alarm["rule"], head) not in self._active]
            if not new and (alarm["heads"] or (alarm["rule"], -1) in self._active):
                continue
            others = f" ({len(alarm['heads'])} heads in all)" if len(alarm["heads"]) > 1 else ""
            subject = "" if alarm["head"] is None else f"{self.heads[alarm['head']]['name']}{others}: "
            value = alarm["value"] if math.isfinite(alarm["value"]) else None
            facts = {"step": step, "rule": alarm["rule"], "heads": new, "head": alarm["head"]}
            fresh.append({**facts, "value": value, "reason": f"{alarm['rule']}: {subject}{alarm['why']}"})
        self._active = _pairs(holding)
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
        self._records, self._columns, self._active, self.count, self._told = [], [], set(), 0, 0

    def _first_process(self) -> bool:
        return not self.shared or get_rank() == 0

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, or what was clipped after it, to the file, and a record to TensorBoard."""
        if not self._first_process():
            return
        if self.path is not None:
            if "values" in record:
                _fill(record, self._columns[-1])
            if not self.path.exists():
                append_line(self.path, json.dumps(self._head()))
            append_line(self.path, json.dumps(record, allow_nan=False))
        if self.board is not None and "values" in record:
            self.board.tell({"step": float(record["step"]), **_summary(record, self._columns[-1])})

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
            gamma = score_factor(layers.heads, now[module][0], head["head"], largest, tau)
            if gamma is None:
                message = f"{head['name']} is not clipped: its relative position bias alone exceeds {tau:g}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                continue
            gammas.setdefault(now[module][0].index, {})[head["head"]] = gamma
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
        self._active = _pairs(self._holding())
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
        self._coming, self._open = None, OpenRecord()
        self.heads, self._records = list(state["heads"]), [dict(record) for record in state["records"]]
        self.count = self._told = len(self._records)
        self._columns = [
            {"finite": np.ones(len(self.heads))}
            | {metric: np.array(column, dtype=float) for metric, column in record["values"].items()}
            for record in self._records
        ]
        self._active = _pairs(self._holding())

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
        losses=[record.get("loss") for record in records] if any("loss" in record for record in records) else [],
        provenance=provenance(**facts),
    )


def _fill(record: dict[str, Any], columns: Mapping[str, np.ndarray]) -> None:
    """Values as JSON holds them, which are made when a record is read or written, not while the model trains."""
    if record["values"] is None:
        record["values"] = {name: plain(column) for name, column in columns.items() if not np.isnan(column).all()}


def _pairs(alarms: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Rules and heads; −1 for what is of no head."""
    return {(alarm["rule"], head) for alarm in alarms for head in alarm["heads"] or [-1]}


def _everywhere(whole: bool) -> bool:
    """Whether every process has a record: one that failed must not leave the others waiting."""
    flag = torch.tensor(float(whole), device="cuda" if get_backend() == "nccl" else "cpu")
    all_reduce(flag, ReduceOp.MIN)
    return bool(flag)


def _summary(record: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The curves of loggers: extremes over heads."""
    row = {"attention/alarms": float(len(record["alarms"]))}
    extremes = {"largest": np.max, "bound": np.max, "sigma": np.max, "sink": np.max}
    for metric, reduce in {**extremes, "smallest": np.min, "relative_entropy": np.min}.items():
        known = columns[metric][np.isfinite(columns[metric])] if metric in columns else np.zeros(0)
        if len(known):
            row[f"attention/{'max' if reduce is np.max else 'min'} {metric}"] = float(reduce(known))
    return row
