"""Many trainings, in parallel and each only once: its result is a file named by its settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from keyquery.support.checks import environment_count
from keyquery.support.files import write_text
from keyquery.support.progress import Progress, silent


@runtime_checkable
class Job(Protocol):
    """A training: settings that name it, and the row of metrics it produces."""

    @property
    def name(self) -> str:
        """The name of its result file, unique to its settings."""

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train and return a row of plain data. `folder` holds what all jobs of the study share."""


def name_of(words: Sequence[object], settings: Mapping[str, Any]) -> str:
    """A readable file name, unique to the settings.

    >>> name_of(("next token", "psd", 0), {"steps": 800})
    'next-token-psd-0-f966387e7e.json'
    """
    readable = "-".join(str(word).replace(" ", "-") for word in words)
    return f"{readable}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]}.json"


def finish(
    jobs: Sequence[Job], folder: Path, device: str, workers: int = 1, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """The rows of all jobs, in order; only jobs without a complete result in `folder` are run.

    `workers` processes share the device; under torchrun its processes share each training
    instead, and `workers` is ignored. A job that fails does not stop the others; the first
    failure is raised when they are done.
    """
    results = folder / "results"
    check_folder(folder)
    results.mkdir(parents=True, exist_ok=True)
    todo = [job for job in {job.name: job for job in jobs}.values() if not _done(results / job.name)]
    watch = progress or silent
    workers = 1 if environment_count("WORLD_SIZE", 1) > 1 else workers
    if workers == 1 or len(todo) < 2:
        for job in watch(todo, "training", len(todo)) if todo else ():
            _work(job, folder, device)
    else:
        _share(todo, folder, device, min(workers, len(todo)), watch)
    return [_row(results / job.name) for job in jobs]


def check_folder(folder: Path) -> None:
    """Raise if `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, and {folder} is a file")


def device_name(device: str) -> str:
    """The device name that a row reports.

    >>> device_name("cpu")
    'cpu'
    """
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def _done(path: Path) -> bool:
    """Whether a result is complete; a partial row belongs to an interrupted job, which is resumed."""
    return path.exists() and not _row(path).get("partial")


def _row(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{path} is an incomplete result: delete it to recompute it")
    return row


def _share(todo: Sequence[Job], folder: Path, device: str, workers: int, watch: Progress) -> None:
    threads = max((os.cpu_count() or 1) // workers, 1)
    context = get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (threads,)) as pool:
        futures = [pool.submit(_work, job, folder, device) for job in todo]
        try:
            failed = [f.exception() for f in watch(as_completed(futures), "training", len(todo)) if f.exception()]
        except BaseException:
            pool.shutdown(cancel_futures=True)  # on an interrupt, pending jobs are not started
            raise
    for error in failed:
        raise error


def _work(job: Job, folder: Path, device: str) -> None:
    write_text(folder / "results" / job.name, json.dumps(job.run(folder, device), allow_nan=False) + "\n")
