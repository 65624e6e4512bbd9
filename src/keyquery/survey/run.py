"""`run`: a survey from models to a folder of results."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keyquery.reading import provenance
from keyquery.support.checks import check_count
from keyquery.support.files import MARK, append_line, remove_temporaries, write_all
from keyquery.support.progress import Progress, silent
from keyquery.survey.executors import Cluster, Cores, Crew, gather
from keyquery.survey.find_models import Entry, find_models
from keyquery.survey.parquet import arrow, write_rows
from keyquery.survey.reading import Survey, answer
from keyquery.survey.worker import HERE, Job, Written, kept_of


def run(
    models: Iterable[str | Path],
    out: str | Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    heads: int | None = None,
    query: str | None = None,
    key: str | None = None,
    config: str | Path | None = None,
    layout: str | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Look at many models, and write what they are, each and together, into the folder `out`.

    `models` are folders, files, globs, text files that list these, hub names, and training runs with all their steps.
    Layers are measured by `workers` processes (as many as there are cores; 1 is this process), or by those of the Dask
    cluster at the address `scheduler`. What is recorded in `out` is not measured again. `heads`, `query`, `key`,
    `config` and `layout` are those of `read`, for all models.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     survey = run([kq.models.ENCODER, kq.models.DECODER], folder, workers=1)
    ...     sorted(os.listdir(folder))
    ['heads.parquet', 'index.html', 'models', 'records', 'survey.json']
    >>> [(row["name"], row["heads"]) for row in survey.models]
    [('decoder', 16), ('encoder', 16)]
    """
    arrow()
    entries = find_models(models)
    if workers is not None:
        check_count("workers", workers)
    crew: Crew = Cores(workers or os.cpu_count() or 1) if scheduler is None else Cluster(scheduler)
    folder = Path(os.path.abspath(out))
    _check_own(folder, entries)
    token = _prepare(folder)
    versions = tuple(provenance()["versions"].items())
    how = (heads, query, key, None if config is None else os.path.abspath(config), layout)
    jobs = {entry: Job("open", entry, str(folder), token, versions, how) for entry in entries}
    work = _Work(crew, jobs, progress or silent)
    try:
        work.open()
        work.measure()
        crew.close()
        return _write(folder, token, work)
    except BaseException:  # an interrupt or SIGTERM, too: no process and no temporary file stays
        crew.close(now=True)
        remove_temporaries([token], _folders(folder))
        raise


class _Work:
    """What is to be done, what is done, and what could not be."""

    def __init__(self, crew: Crew, jobs: Mapping[Entry, Job], progress: Progress) -> None:
        self.crew, self.jobs, self.watch = crew, jobs, progress
        self.opened: dict[Entry, dict[str, Any]] = {}
        self.broken: dict[Entry, str] = {}
        self.left: dict[Entry, set[int]] = {}
        self.was: list[Written] = []  # pages and JSON that models had under other names

    def open(self) -> None:
        """See of every model how many layers it has, and which of them are recorded."""
        results = gather(self.crew, deque(self.jobs.values()))
        for job, found in self.watch(results, "opening models", len(self.jobs)):
            if not self._breaks(job.entry, found):
                self.opened[job.entry] = found

    def measure(self) -> None:
        """Measure what is missing, and join every model as soon as it is whole."""
        queue: deque[Job] = deque()
        for entry, found in sorted(self.opened.items(), key=lambda item: item[0].name):
            self.left[entry] = set(found["missing"])
            if found["missing"]:
                queue.extend(self._job(entry, "layer", layer) for layer in found["missing"])
            elif not found["joined"]:
                queue.append(self._job(entry, "join"))
        total = sum(map(len, self.left.values()))
        for _ in self.watch(self._layers(queue), "measuring layers", total):
            pass

    def _layers(self, queue: deque[Job]) -> Iterator[Job]:
        """Layers as they are done, those of a broken model too; in between, models are joined."""
        if not queue:
            return
        for job, found in gather(self.crew, queue):
            entry = job.entry
            if self._breaks(entry, found):
                waiting = list(queue)
                queue.clear()
                queue.extend(other for other in waiting if other.entry != entry)
                yield from (other for other in waiting if other.entry == entry)
            elif job.kind == "join":
                self.was += [found["was"]] if found.get("was") else []
                self.left[entry] = set(found.get("again", ()))
                queue.extendleft(self._job(entry, "layer", layer) for layer in self.left[entry])
            else:
                self.left[entry].discard(job.layer)
                if not self.left[entry]:
                    queue.appendleft(self._job(entry, "join"))
            if job.kind == "layer":
                yield job

    def _breaks(self, entry: Entry, found: Mapping[str, Any]) -> bool:
        if "broken" in found:
            self.broken.setdefault(entry, found["broken"])
        return entry in self.broken

    def _job(self, entry: Entry, kind: str, layer: int = -1) -> Job:
        first = self.jobs[entry]
        return Job(kind, entry, first.out, first.token, first.versions, first.read, self.opened[entry]["stamp"], layer)


def _check_own(folder: Path, entries: Iterable[Entry]) -> None:
    """Refuse a folder where results would replace files that no survey wrote."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, and {folder} is a file")
    if _runs(folder):
        return
    pages = [folder / "models" / f"{entry.file}{ending}" for entry in entries for ending in (".html", ".json")]
    results = [folder / name for name in ("survey.json", "heads.parquet", "index.html")]
    taken = [path for path in (*results, *pages) if os.path.lexists(path)]
    if taken and not _is_survey(results[0]):  # whose `records` were deleted
        raise FileExistsError(f"{taken[0]} exists, and no survey wrote it: out must be another folder")


def _is_survey(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"kind": "survey"' in file.read(100)


def _runs(folder: Path) -> list[str]:
    """Marks of the runs that have written into the folder, the last one last."""
    manifest = folder / "records" / HERE
    if not os.path.lexists(manifest):
        return []
    marks = manifest.read_text(encoding="utf-8", errors="replace").split() if manifest.is_file() else [""]
    if not all(map(MARK.fullmatch, marks)):
        raise ValueError(f"{manifest} was not written by a survey: out must be another folder")
    return marks


def _folders(folder: Path) -> list[Path]:
    """Where a survey writes."""
    own = [folder, folder / "models", folder / "records"]
    return [*own, *(path for path in own[2].iterdir() if path.is_dir() and not path.is_symlink())]


def _prepare(folder: Path) -> str:
    """Make the folders, and say that this run has them; what killed runs left half written is removed.

    The manifest of runs grows by a line before the run writes anything else: whatever ends in one of its marks is ours.
    """
    before = _runs(folder)
    for part in (folder, folder / "models", folder / "records"):
        try:
            part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{part} could not be made: {error.strerror or error}") from None
    remove_temporaries(before, _folders(folder))
    token = secrets.token_hex(16)
    append_line(folder / "records" / HERE, token)
    return token


def _write(folder: Path, token: str, work: _Work) -> Survey:
    """The table of heads, one model after the other, and the survey on the whole."""
    done = [entry for entry in work.jobs if entry not in work.broken]
    if not done:
        first, why = next(iter(work.broken.items()))
        raise ValueError(f"none of {len(work.broken)} models could be read; {first.name}: {why}")
    rows: list[dict[str, Any]] = []

    def parts() -> Iterator[tuple[dict[str, Any], dict[str, list[Any]]]]:
        for entry in done:
            kept = kept_of(folder / "records" / entry.key, work.opened[entry]["stamp"])
            row = {**kept["model"], "run": entry.run, "step": entry.step, "file": entry.file, "source": entry.source}
            rows.append(row)
            yield {**row, "model": entry.name}, kept["heads"]

    write_rows(folder / "heads.parquet", parts(), token)
    broken = [
        {"name": entry.name, "source": entry.source, "why": why}
        for entry, why in sorted(work.broken.items(), key=lambda item: item[0].name)
    ]
    survey = Survey(models=rows, broken=broken, provenance=provenance(), **answer(rows))
    write_all({folder / "survey.json": survey.to_json() + "\n", folder / "index.html": survey.page()}, token)
    for was in work.was:
        if was.file not in {entry.file for entry in work.jobs}:
            was.remove(folder / "models")
    return survey
