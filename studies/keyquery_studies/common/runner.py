"""Runs of a study: each is computed once, in parallel if wanted, and an interrupted study is resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from keyquery.support.checks import environment_count
from keyquery.support.progress import Progress, silent
from keyquery_studies.common.store import Store

Item = TypeVar("Item")


@runtime_checkable
class Job(Protocol):
    """A run: settings that name it, and the row of metrics it produces."""

    @property
    def name(self) -> str:
        """The name of its result file, unique to its settings."""

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Compute a row of plain data. `folder` holds what all jobs of the study share."""


@contextmanager
def study_folder(out: str | Path | None) -> Iterator[Path]:
    """The folder of a study: `out`, or a temporary one."""
    with nullcontext(str(out)) if out is not None else TemporaryDirectory() as path:
        folder = Path(path)
        check_folder(folder)
        yield folder


def check_folder(folder: Path) -> None:
    """Raise if `folder` is a file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, and {folder} is a file")


def device_name(device: str) -> str:
    """The device name that a row reports."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def run_parts(
    parts: Mapping[str, Sequence[Job]], folder: Path, device: str, workers: int = 1, progress: Progress | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The rows of every part of a study, whose jobs share one pool of workers."""
    rows = iter(run_jobs([job for jobs in parts.values() for job in jobs], folder, device, workers, progress))
    return {part: list(islice(rows, len(jobs))) for part, jobs in parts.items()}


def run_jobs(
    jobs: Sequence[Job], folder: Path, device: str, workers: int = 1, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """The rows of all jobs, in order; only jobs without a complete result in `folder` are run.

    `workers` processes share the device; under torchrun its processes share each training
    instead, and `workers` is ignored. A job that fails does not stop the others; the first
    failure is raised when they are done.
    """
    check_folder(folder)
    store = Store(folder / "results")
    store.folder.mkdir(parents=True, exist_ok=True)
    todo = [job for job in {job.name: job for job in jobs}.values() if not store.done(job.name)]
    watch = progress or silent
    workers = 1 if environment_count("WORLD_SIZE", 1) > 1 else workers
    if workers == 1 or len(todo) < 2:
        for job in watch(todo, "training", len(todo)) if todo else ():
            _work(job, folder, device)
    else:
        _share(todo, folder, device, min(workers, len(todo)), watch)
    return [store.read(job.name) for job in jobs]


def resumed(
    items: Iterable[Item], name: Callable[[Item], str], compute: Callable[[Item], Any], store: Store | None
) -> Iterator[Any]:
    """The result of each item, in order: read from the store, or computed and written before the next one.

    For runs that share a live model, or show their own progress, which `run_jobs` cannot.
    """
    for item in items:
        if store is not None and store.done(name(item)):
            yield store.read(name(item))
            continue
        result = compute(item)
        if store is not None:
            store.write(name(item), result, allow_nan=True)
        yield result


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
    Store(folder / "results").write(job.name, job.run(folder, device))
