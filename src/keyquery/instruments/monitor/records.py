"""Records of a monitor: measurements of all heads by step, alarms, and the file that they are written to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, get_rank, is_available, is_initialized

from keyquery.checkpoints import Heads
from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.clip import clip_heads
from keyquery.instruments.monitor.interception import Seen
from keyquery.instruments.monitor.reading import METRICS, Monitored
from keyquery.instruments.monitor.statistics import ENTROPY, LARGEST, QUERIES, SINK, SMALLEST, UNIFORM
from keyquery.instruments.monitor.weights import bounds, gradient_norms, structure
from keyquery.reading import provenance
from keyquery.support.files import append_line, read_text, write_text
from keyquery.training.tensorboard import Board

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
        self.records: list[dict[str, Any]] = []  # {step, values: {metric: [per head]}, alarms, clips}
        self.shared = False  # whether processes share one model
        self.path = None if folder is None else Path(folder) / FILE
        self.board = None if board is None else Board(board, name)
        self.dtype = "float32"
        self._open: dict[str, list[dict[str, Tensor]]] = {}  # by module: measurements of every forward
        self._active: set[tuple[str, int]] = set()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.load(read_records(self.path))

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.records)

    def add(self, step: int, seen: Mapping[str, Seen], heads: Heads | None, whole: bool) -> None:
        """Add what one forward shows; `whole`: with ranks and shares."""
        seen = {name: each for name, each in seen.items() if each.statistics}
        measured: dict[str, dict[str, Tensor]] = {}
        for name, each in seen.items():
            statistics = each.merged().double()
            values = {"statistics": statistics, "unscaled": _size(statistics) / each.scale}
            if each.entries:
                values["entry"] = torch.stack(each.entries).amax(0).double()
            if each.norms:
                values["input_norm"] = torch.stack(each.norms).max().double().expand(statistics.shape[1])
            measured[name] = values
            self.dtype = str(each.dtype).removeprefix("torch.")
        if heads is not None:
            self._weights(measured, seen, heads, whole)
        for name, values in measured.items():
            self._open.setdefault(name, []).append(values)

    def _weights(
        self, measured: dict[str, dict[str, Tensor]], seen: Mapping[str, Seen], heads: Heads, whole: bool
    ) -> None:
        layers = {module_of(layer.name, seen): layer for layer in reversed(list(heads))}  # of MLA, the unrotated part
        layers = {
            name: layer for name, layer in layers.items() if name in seen and layer.heads == _heads(measured[name])
        }
        norms = {
            layer.name: measured[name].get("input_norm", torch.full((1,), math.nan))[0]
            for name, layer in layers.items()
        }
        found = bounds(list(layers.values()), norms)
        for name, layer in layers.items():
            sigma, bound = found[layer.name]
            above = measured[name]["statistics"][LARGEST].to(bound.device)
            wrong = (
                above > bound * (1 + 16 * torch.finfo(seen[name].dtype).eps) + 1e-6
            )  # of inputs that are not the layer's own
            measured[name] |= {"sigma": sigma, "bound": bound.masked_fill(wrong, math.nan)}
            if whole:
                measured[name] |= structure(layer, seen[name])

    def add_gradients(self, heads: Heads, model: nn.Module) -> None:
        """Gradient norms of the open record."""
        if not self._open:
            return
        for name, (query, key) in gradient_norms(heads, model).items():
            module = module_of(name, self._open)
            if module in self._open and len(query) == _heads(self._open[module][0]):
                self._open[module][0] |= {"query_gradient": query.double(), "key_gradient": key.double()}

    def finish(self, step: int) -> None:
        """Close the record of a step: raise alarms, and write it."""
        opened, self._open = self._open, {}
        if not opened:
            return
        values = {name: _merged(parts) for name, parts in opened.items()}
        if self.shared:
            _reduce(values)
        if not self.heads:
            self.heads = [
                {"layer": layer, "head": head, "name": f"{name}.{head}".lstrip(".")}
                for layer, (name, of_layer) in enumerate(values.items())
                for head in range(len(of_layer["largest"]))
            ]
        flat = {metric: _flat([of_layer.get(metric) for of_layer in values.values()], values) for metric in METRICS}
        record = {
            "step": step,
            "values": {metric: column for metric, column in flat.items() if any(v is not None for v in column)},
        }
        self.records.append({**record, "alarms": []})
        self.records[-1]["alarms"] = self._alarms(step)
        self.write(self.records[-1])

    def _alarms(self, step: int) -> list[dict[str, Any]]:
        layers = [head["layer"] for head in self.heads]
        raised = self.rules.check(self.history(), [record["step"] for record in self.records], layers, self.dtype)
        now = {(alarm["rule"], head) for alarm in raised for head in alarm["heads"]}
        fresh = []
        for alarm in raised:
            if new := [head for head in alarm["heads"] if (alarm["rule"], head) not in self._active]:
                others = f" ({len(alarm['heads'])} heads in all)" if len(alarm["heads"]) > 1 else ""
                reason = f"{alarm['rule']}: {self.heads[alarm['head']]['name']}{others}: {alarm['why']}"
                value = alarm["value"] if math.isfinite(alarm["value"]) else None
                fresh.append(
                    {
                        "step": step,
                        "rule": alarm["rule"],
                        "heads": new,
                        "head": alarm["head"],
                        "value": value,
                        "reason": reason,
                    }
                )
        self._active = now
        if not self.shared or get_rank() == 0:
            for alarm in fresh:
                self.on_alarm(alarm)
        return fresh

    def history(self, window: int = 64) -> dict[str, np.ndarray]:
        """The latest records by metric, (records, heads); NaN where not measured."""
        recent = self.records[-window:] if len(self.records) > window else self.records
        kept = [self.records[0], *recent[1:]] if recent else []
        return {
            metric: np.array([_floats(record["values"].get(metric), len(self.heads)) for record in kept])
            for metric in METRICS
        }

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to the file and to TensorBoard."""
        if self.shared and get_rank() > 0:
            return
        if self.path is not None:
            if not self.path.exists():
                write_text(self.path, "")
                append_line(self.path, json.dumps({"model": self.name, "every": self.every, "heads": self.heads}))
            append_line(self.path, json.dumps(record, allow_nan=False))
        if self.board is not None and "values" in record:
            self.board.tell(_summary(record), float("nan"))

    def clip(self, model: nn.Module, heads: Heads, tau: float) -> list[dict[str, Any]]:
        """Clip the heads whose largest logit in the latest record exceeds tau, once per record."""
        if not self.records or "clips" in self.records[-1]:
            return []
        record = self.records[-1]
        layers = {module_of(layer.name, self._modules()): layer.index for layer in reversed(list(heads))}
        clips: list[dict[str, Any]] = []
        gammas: dict[int, dict[int, float]] = {}
        for head, largest in zip(self.heads, record["values"]["largest"], strict=True):
            module = head["name"].rpartition(".")[0]
            if largest is not None and largest > tau:
                gammas.setdefault(layers[module], {})[head["head"]] = tau / largest
                clips.append(
                    {"step": record["step"], "name": head["name"], "largest": largest, "factor": tau / largest}
                )
        record["clips"] = clips
        if clips:
            clip_heads(model, heads, gammas)
            self.write({"step": record["step"], "clips": clips})
        return clips

    def _modules(self) -> dict[str, int]:
        return {head["name"].rpartition(".")[0]: 0 for head in self.heads}

    def drop(self, step: int) -> None:
        """Drop records from a step on."""
        kept = [record for record in self.records if record["step"] < step]
        if len(kept) == len(self.records):
            return
        self.records = kept
        if self.path is not None and self.path.exists():
            lines = [{"model": self.name, "every": self.every, "heads": self.heads}, *kept]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def state(self) -> dict[str, Any]:
        """All records as plain data."""
        return {"model": self.name, "every": self.every, "heads": self.heads, "records": self.records}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace all records."""
        self.heads, self.records = list(state["heads"]), [dict(record) for record in state["records"]]

    def reading(self, facts: Mapping[str, Any]) -> Monitored:
        """All records as a Reading."""
        return reading_of(self.state(), facts)

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self.board is not None:
            self.board.close()


def module_of(name: str, modules: Mapping[str, Any]) -> str:
    """The module of a layer; both kernels of latent attention belong to one."""
    name = name.removesuffix(" (nope)").removesuffix(" (rope)")
    return "" if name == "attention" and name not in modules else name


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
            "the monitor has recorded nothing: no training step ran under `with monitor`, or before monitor.step()"
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


def _heads(values: Mapping[str, Tensor]) -> int:
    return values["statistics"].shape[1]


def _size(statistics: Tensor) -> Tensor:
    return torch.maximum(statistics[LARGEST].abs(), statistics[SMALLEST].abs())


def _merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Measurements of several forwards of one step: statistics joined, of all others the largest."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(key for part in parts for key in part):
        stack = torch.stack([part[name].cpu() for part in parts if name in part])
        if name == "statistics":
            found["largest"], found["smallest"] = stack[:, LARGEST].amax(0), stack[:, SMALLEST].amin(0)
            found["sums"] = stack[:, ENTROPY:].sum(0)
        else:
            found[name] = stack.amax(0)
    return _means(found)


def _means(found: dict[str, Tensor]) -> dict[str, Tensor]:
    sums = found["sums"]
    queries = sums[QUERIES - ENTROPY].clamp(min=1)
    found["entropy"], found["sink"] = sums[0] / queries, sums[SINK - ENTROPY] / queries
    found["relative_entropy"] = sums[0] / sums[UNIFORM - ENTROPY].clamp(min=1e-9)
    found["finite"] = (found["largest"].isfinite() & found["smallest"].isfinite()).double()
    return found


def _reduce(values: dict[str, dict[str, Tensor]]) -> None:
    """Join the measurements of all processes."""
    if not (is_available() and is_initialized()):
        return
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    for found in values.values():
        for name in ("largest", "unscaled", "entry", "input_norm", "bound", "sums"):
            if name in found:
                moved = found[name].to(device)
                all_reduce(moved, ReduceOp.SUM if name == "sums" else ReduceOp.MAX)
                found[name] = moved.cpu()
        lowest = -found["smallest"].to(device)
        all_reduce(lowest, ReduceOp.MAX)
        found["smallest"] = -lowest.cpu()
        _means(found)


def _flat(columns: Sequence[Tensor | None], values: Mapping[str, Mapping[str, Tensor]]) -> list[float | None]:
    """One value per head, None where there is none or it is not finite."""
    flat: list[float | None] = []
    for column, of_layer in zip(columns, values.values(), strict=True):
        numbers = [math.nan] * len(of_layer["largest"]) if column is None else column.tolist()
        flat += [float(f"{number:.7g}") if math.isfinite(number) else None for number in numbers]
    return flat


def _floats(column: Sequence[float | None] | None, count: int) -> list[float]:
    return [math.nan] * count if column is None else [math.nan if value is None else value for value in column]


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
