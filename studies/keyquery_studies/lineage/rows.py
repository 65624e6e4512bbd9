"""Rows of the study in a folder: written as they come, kept between runs, and joined."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from keyquery.support.files import append_line, write_all, writing
from keyquery_studies.common.runner import device_name
from keyquery_studies.lineage.models import Weights
from keyquery_studies.lineage.training import Plan

FILES = {"bases": ("null",), "kin": ("kin", "changed")}  # rows of each part


def check_plan(folder: Path, plan: Plan) -> None:
    """Raise if the folder holds rows of another plan; the time limit may differ."""
    if (path := folder / "facts.json").exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))["plan"]
        own = json.loads(json.dumps(settings(plan)))
        differing = sorted(name for name in own if name != "seconds" and own[name] != earlier.get(name))
        if differing:
            names = ", ".join(f"{name} {earlier.get(name)} (now {own[name]})" for name in differing)
            raise ValueError(
                f"{folder} holds a run of other settings: {names}; use another folder, or the same settings"
            )


def settings(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, configs by their names."""
    return {**asdict(plan), "sizes": [size.name for size in plan.sizes]}


def write_facts(folder: Path, plan: Plan, device: str, steps: Mapping[str, int]) -> None:
    """What a reading says about its trainings."""
    facts = {"plan": settings(plan), "device": device_name(device), "steps": steps, "trained_with": torch.__version__}
    write_all({folder / "facts.json": json.dumps(facts)})


def read_facts(folder: Path) -> dict[str, Any]:
    """What `write_facts` wrote."""
    if not (path := folder / "facts.json").exists():
        raise ValueError(f"{folder} holds no rows of the study lineage: train the part bases first")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def rows_of(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Rows of some files, in an order that does not depend on which process was first."""
    paths = [folder / f"{name}.jsonl" for name in names]
    rows = [json.loads(line) for path in paths if path.exists() for line in path.read_text("utf-8").splitlines()]
    return sorted(rows, key=_order)


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    words = [str(row.get(name, "")) for name in ("set", "config", "kind", "base", "first", "second")]
    pieces = [piece for word in words for piece in (*re.split(r"(\d+)", word), "")]
    return tuple((0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in pieces)


def is_complete(folder: Path, part: str) -> bool:
    """Whether all rows of a part are there."""
    return (folder / f"{part}.done").exists()


def mark_complete(folder: Path, part: str) -> None:
    """All rows of a part are there."""
    write_all({folder / f"{part}.done": ""})


def clear(folder: Path, part: str) -> None:
    """Remove the rows of a part, which is computed again."""
    for name in FILES[part]:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)


def save_groups(folder: Path, groups: Mapping[str, Weights]) -> None:
    """All weights of trained models, from which others are made."""
    folder.mkdir(parents=True, exist_ok=True)
    for group, weights in groups.items():
        with writing(folder / f"{group}.safetensors") as file:
            save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, file)


def load_groups(folder: Path, device: str) -> dict[str, Weights]:
    """What `save_groups` wrote, by name."""
    return {path.stem: load_file(path, device) for path in sorted(folder.glob("*.safetensors"))}


class Pool:
    """Processes that compute rows, which are written as JSON lines as they come."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.pending = folder, dict[Future[Any], str]()
        self.executor = ProcessPoolExecutor(workers, get_context("spawn"))

    def put(self, name: str, job: Callable[..., Any], *arguments: Any) -> None:
        """Rows of `job` go to the file `name`."""
        future = self.executor.submit(job, *arguments)
        self.pending[future] = name
        future.add_done_callback(self._write)

    def _write(self, future: Future[Any]) -> None:
        if future.cancelled() or future.exception():
            return
        rows = future.result()
        for row in rows if isinstance(rows, list) else [rows]:
            append_line(self.folder / f"{self.pending[future]}.jsonl", json.dumps(row))

    def close(self) -> None:
        """Wait for all rows; the first failure is raised."""
        self.executor.shutdown()
        for future in self.pending:
            future.result()


def without(pairs: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pairs that have no row."""
    done = {(row["first"], row["second"]) for row in rows}
    return [pair for pair in pairs if pair not in done]
