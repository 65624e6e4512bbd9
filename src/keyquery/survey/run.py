"""Run a survey: from models to a folder of results."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keyquery.reading import provenance
from keyquery.support.checks import check_count
from keyquery.support.files import MARK, append_line, regular, remove_temporaries, write_all
from keyquery.support.progress import Progress, silent
from keyquery.survey.executors import Backend, Cluster, Cores, gather
from keyquery.survey.find_models import Entry, find_models
from keyquery.survey.parquet import arrow, write_rows
from keyquery.survey.reading import Survey, answer
from keyquery.survey.worker import HERE, Job, Written, kept_of

FOLDERS = ("models", "records", "fingerprints")


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
    """Run `look` on many models, and write the results per model and for all of them into a folder.

    Its folder `fingerprints` is an index for `keyquery lineage --among`.

    Parameters
    ----------
    models
        Folders, files, globs, text files that list these, hub names, and training runs with all their checkpoints.
    out
        Folder for results. Results already recorded there are reused, so an interrupted survey resumes.
    workers
        Number of local worker processes; 1 runs in this process. Default: one per core.
    scheduler
        Address of a Dask scheduler whose workers do the work instead.
    heads, query, key, config, layout
        As in `read`, for all models.
    progress
        Wraps iterables to show progress. Default: silent.

    Returns
    -------
    Survey
        One row per model, and trends over training, size and architecture.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     survey = run([kq.models.ENCODER, kq.models.DECODER], folder, workers=1)
    ...     sorted(os.listdir(folder))
    ['fingerprints', 'heads.parquet', 'index.html', 'models', 'records', 'survey.json']
    >>> [(row["name"], row["heads"]) for row in survey.models]
    [('decoder', 16), ('encoder', 16)]
    """
    arrow()
    entries = find_models(models)
    if workers is not None:
        check_count("workers", workers)
    if config is not None:
        regular(config)
    backend: Backend = Cores(workers or os.cpu_count() or 1) if scheduler is None else Cluster(scheduler)
    folder = Path(os.path.abspath(out))
    _check_own(folder, entries)
    token = _prepare(folder)
    versions = tuple(provenance()["versions"].items())
    how = (heads, query, key, None if config is None else os.path.abspath(config), layout)
    jobs = {entry: Job("open", entry, str(folder), token, versions, how) for entry in entries}
    work = _Work(backend, jobs, progress or silent)
    try:
        work.open()
        work.measure()
        backend.close()
        return _write(folder, token, work)
    except BaseException:  # also on an interrupt or SIGTERM, leave no process and no temporary file
        backend.close(now=True)
        remove_temporaries([token], _folders(folder))
        raise


class _Work:
    """The state of a survey: jobs to do, models that were opened, and models that failed."""

    def __init__(self, backend: Backend, jobs: Mapping[Entry, Job], progress: Progress) -> None:
        self.backend = backend
        self.jobs = jobs
        self.watch = progress
        self.opened: dict[Entry, dict[str, Any]] = {}
        self.broken: dict[Entry, str] = {}
        self.left: dict[Entry, set[int]] = {}
        self.was: list[Written] = []  # pages and JSON written under a model's former name

    def open(self) -> None:
        """Open every model, to learn how many layers it has and which of them are recorded."""
        results = gather(self.backend, deque(self.jobs.values()))
        for job, facts in self.watch(results, "opening models", len(self.jobs)):
            if not self._breaks(job.entry, facts):
                self.opened[job.entry] = facts

    def measure(self) -> None:
        """Measure missing layers, and join the layers of each model as soon as it is complete."""
        queue: deque[Job] = deque()
        for entry, facts in sorted(self.opened.items(), key=lambda item: item[0].name):
            self.left[entry] = set(facts["missing"])
            if facts["missing"]:
                queue.extend(self._job(entry, "layer", layer) for layer in facts["missing"])
            elif not facts["joined"]:
                queue.append(self._job(entry, "join"))
        total = sum(map(len, self.left.values()))
        for _ in self.watch(self._layers(queue), "measuring layers", total):
            pass

    def _layers(self, queue: deque[Job]) -> Iterator[Job]:
        """Layers as they finish, including those of failed models; complete models are joined in between."""
        if not queue:
            return
        for job, facts in gather(self.backend, queue):
            entry = job.entry
            if self._breaks(entry, facts):
                waiting = list(queue)
                queue.clear()
                queue.extend(other for other in waiting if other.entry != entry)
                yield from (other for other in waiting if other.entry == entry)
            elif job.kind == "join":
                self.was += [facts["was"]] if facts.get("was") else []
                self.left[entry] = set(facts.get("again", ()))
                queue.extendleft(self._job(entry, "layer", layer) for layer in self.left[entry])
            else:
                self.left[entry].discard(job.layer)
                if not self.left[entry]:
                    queue.appendleft(self._job(entry, "join"))
            if job.kind == "layer":
                yield job

    def _breaks(self, entry: Entry, facts: Mapping[str, Any]) -> bool:
        if "broken" in facts:
            self.broken.setdefault(entry, facts["broken"])
        return entry in self.broken

    def _job(self, entry: Entry, kind: str, layer: int = -1) -> Job:
        first = self.jobs[entry]
        return Job(kind, entry, first.out, first.token, first.versions, first.read, self.opened[entry]["stamp"], layer)


def _check_own(folder: Path, entries: Iterable[Entry]) -> None:
    """Refuse a folder in which results would replace files that were not written by a survey."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, but {folder} is a file")
    if _runs(folder):
        return
    pages = [folder / "models" / f"{entry.file}{ending}" for entry in entries for ending in (".html", ".json")]
    pages += [folder / "fingerprints" / f"{entry.file}.safetensors" for entry in entries]
    results = [folder / name for name in ("survey.json", "heads.parquet", "index.html")]
    existing = [path for path in (*results, *pages) if os.path.lexists(path)]
    if existing and not _is_survey(results[0]):  # a survey whose `records` were deleted may be replaced
        raise FileExistsError(f"{existing[0]} exists and was not written by a survey: choose another folder for out")


def _is_survey(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"kind": "survey"' in file.read(100)


def _runs(folder: Path) -> list[str]:
    """Marks of the runs that have written into the folder, the latest last."""
    manifest = folder / "records" / HERE
    if not os.path.lexists(manifest):
        return []
    marks = manifest.read_text(encoding="utf-8", errors="replace").split() if manifest.is_file() else [""]
    if not all(map(MARK.fullmatch, marks)):
        raise ValueError(f"{manifest} was not written by a survey: choose another folder for out")
    return marks


def _folders(folder: Path) -> list[Path]:
    """The folders that a survey writes to."""
    own = [folder, *(folder / name for name in FOLDERS)]
    return [*own, *(path for path in (folder / "records").iterdir() if path.is_dir() and not path.is_symlink())]


def _prepare(folder: Path) -> str:
    """Create the folders, register this run in the manifest, and remove partial files of runs that were killed.

    A run adds its mark to the manifest before it writes anything else, so that file names ending in a listed mark are
    known to belong to a survey.
    """
    before = _runs(folder)
    for part in (folder, *(folder / name for name in FOLDERS)):
        try:
            part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"could not create {part}: {error.strerror or error}") from None
    remove_temporaries(before, _folders(folder))
    token = secrets.token_hex(16)
    append_line(folder / "records" / HERE, token)
    return token


def _write(folder: Path, token: str, work: _Work) -> Survey:
    """Write the table of heads, one model at a time, and the survey."""
    done = [entry for entry in work.jobs if entry not in work.broken]
    if not done:
        first, why = next(iter(work.broken.items()))
        raise ValueError(f"none of the {len(work.broken)} models could be read; {first.name}: {why}")
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
            was.remove(folder)
    return survey
